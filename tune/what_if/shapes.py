"""Shapes of worker groups as a command names them: "8xH100,4xA10G@25Gbit/50us,3xcpu"; their links and prices."""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.files.prices import Price
from trainers.errors import ConfigError
from trainers.step.data_sheets import DataSheet, data_sheet, data_sheets
from tune.what_if.step_time import Link

_OPTION = "--what-if"
_SHAPE = re.compile(r"(\d{1,5})x([\w.-]+?)(?:@([\d.]{1,9})Gbit(?:/([\d.]{1,9})us)?)?")
_LATENCY_US = 50.0
_REACHED = 0.8  # of what a link is called, by large all-reduces
_GIVEN = 0.3  # how far a link may be off what it is called, as a logarithm
IN_A_MACHINE = "in a machine"
LINKS = {
    IN_A_MACHINE: Link(3e10, 2e-5, 1.2),  # from PCIe to NVLink
    "between machines": Link(3e9, 5e-5, 1.0),  # 10 to 100 Gbit/s
}
MEASURED = Link(3e9, 5e-5, 1.5)
"""What is known of a link over which workers were measured, before that is looked at."""


@dataclass(frozen=True)
class Shape:
    """A group of equal workers that is asked for."""

    text: str
    workers: int
    device: str
    """`cpu`, or the short name of a GPU."""
    link: Link | None = None
    """None: not said."""

    @property
    def sheet(self) -> DataSheet | None:
        """The GPU's data sheet."""
        return next((one for one in data_sheets() if one.model == self.device), None)

    def link_name(self, measured: Mapping[str, int], prices: Sequence[Price]) -> str:
        """Return the name of its link: as it was given, that over which runs on such devices were measured, or a guess.

        `measured` has the most workers that ran over a link. What was measured within a machine, by the price list,
        says nothing of a shape that is larger than one.
        """
        if self.link is not None:
            return self.text
        most, own = (
            max((one.gpus for one in prices if is_of(one, self.device)), default=1),
            measured_on(self.device),
        )
        is_within = self.workers <= most
        if own in measured and (self.device == "cpu" or is_within or measured[own] > most):
            return own
        return IN_A_MACHINE if is_within else "between machines"


def measured_on(device: str) -> str:
    """Return the name of the link over which runs on a device were measured."""
    return f"measured on {device}"


def device_of(label: str) -> str:
    """Return the short name of a device by what a trial's record calls it ("NVIDIA A10G, 22.5 GiB")."""
    name = label.partition(",")[0]
    sheet = data_sheet(name)
    return (sheet and sheet.model) or name


def read_shapes(text: str) -> list[Shape]:
    """Read a list of shapes; ConfigError says which of them is none."""
    return [_read(part.strip()) for part in text.split(",")]


def _read(text: str) -> Shape:
    found = _SHAPE.fullmatch(text)
    if found is None or int(found[1]) == 0:
        raise ConfigError(_OPTION, text, "is no number of devices", "write for example 8xH100 or 4xA10G@25Gbit/50us")
    names = {"cpu": "cpu"} | {one.model.lower(): one.model for one in data_sheets() if one.model}
    device = names.get(found[2].lower())
    if device is None:
        near = difflib.get_close_matches(found[2].lower(), names, n=3, cutoff=0.5)
        known = ", ".join(names[name] for name in near) or ", ".join(names.values())
        raise ConfigError(_OPTION, text, f"names an unknown device, {found[2]}", f"known are {known}")
    link = None
    if found[3]:
        rate, latency = float(found[3]) / 8 * 1e9 * _REACHED, float(found[4] or _LATENCY_US) * 1e-6
        if rate <= 0 or latency <= 0:
            raise ConfigError(_OPTION, text, "has a link that carries nothing", "write for example 4xA10G@25Gbit/50us")
        link = Link(rate, latency, _GIVEN)
    return Shape(text, int(found[1]), device, link)


def is_of(price: Price, device: str) -> bool:
    """Return whether a machine has GPUs of a model."""
    return price.gpus > 0 and price.gpu_model in (device, device.removesuffix("-PCIe"))


def cheapest(shape: Shape, link: str, prices: Sequence[Price]) -> tuple[float, str] | None:
    """Return dollars an hour and the machines of the cheapest that hold a shape; None where no price is known."""
    found, least = [], shape.workers if link == IN_A_MACHINE else 1
    for one in prices:
        if is_of(one, shape.device) and one.gpus >= least:
            machines = math.ceil(shape.workers / one.gpus)
            found.append(
                (machines * one.usd_per_hour, f"{machines} x {one.instance_type} ({one.provider}, {one.region})")
            )
    return min(found, default=None)

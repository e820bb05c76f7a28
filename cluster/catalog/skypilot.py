"""Pure: the text of a SkyPilot catalog (`vms.csv`, schemas v5 to v8) as prices.

https://github.com/skypilot-org/skypilot-catalog describes its columns. A row is a machine in a zone (of Azure and of
most GPU clouds: in a region). Google's machines and accelerators have rows and prices apart: the price of a machine
that brings its GPUs along is the sum of both.
"""

import csv
import io
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.files.prices import MOST_USD_PER_HOUR
from trainers.errors import MISSING, ConfigError

COLUMNS = ("InstanceType", "AcceleratorName", "AcceleratorCount", "vCPUs", "Price", "SpotPrice", "Region")

_NAME = re.compile(r"[\w .,/:+@()-]{1,200}")
# Accelerators that Ray does not count as GPUs.
_NO_GPU = re.compile(r"tpu|Trainium|Inferentia|Gaudi|Qualcomm|Xilinx|VU9P|FPGA", re.IGNORECASE)
_ROUNDED = 1e-3
"""Spot prices have fewer digits than on-demand ones, and may equal them."""
_GPU_MODELS = {"A100": "A100-40GB", "H100-80GB": "H100"}
"""Names that say more than the catalog's."""
_GPUS = {"Standard_ND96isr_H100_v5": 8, "Standard_ND96is_H100_v5": 8}
"""Where the catalog says 12."""
# https://cloud.google.com/compute/docs/gpus: the accelerators of machine types that come with them. The number is in
# the name, but for G2 and G4, whose numbers of processors give it.
_GOOGLE = {
    "a2-highgpu": "A100",
    "a2-megagpu": "A100",
    "a2-ultragpu": "A100-80GB",
    "a3-highgpu": "H100",
    "a3-edgegpu": "H100",
    "a3-megagpu": "H100-MEGA",
    "a3-ultragpu": "H200",
    "a4-highgpu": "B200",
    "g2-standard": "L4",
    "g4-standard": "RTX-PRO-6000",
}
_GPUS_BY_VCPUS = {
    "g2-standard": {4: 1, 8: 1, 12: 1, 16: 1, 24: 2, 32: 1, 48: 4, 96: 8},
    "g4-standard": {48: 1, 96: 2, 192: 4, 384: 8},
}


_GOOGLE_TYPE = re.compile(rf"(?P<family>{'|'.join(_GOOGLE)})-(?P<number>\d+)")


@dataclass(frozen=True)
class Row:
    """A machine in a zone or region, or several zones' machines as one."""

    instance_type: str
    gpu_model: str
    gpus: float
    vcpus: float
    region: str
    zone: str
    usd_per_hour: float
    spot_usd_per_hour: float | None


@dataclass(frozen=True)
class Machines:
    """What a catalog says of a provider."""

    rows: Sequence[Row]
    """One for each machine and region; `zone` names the zones with spaces between."""
    left_out: Mapping[str, int]
    """Rows that were left out, by the reason."""


def parse_catalog(text: str, provider: str, source: str) -> Machines:
    """Return the machines of a provider's catalog.

    On-demand prices differ by region only. Spot prices differ by zone: the median is taken, of two in the middle the
    higher, because Ray chooses the zone later. Left out are rows without a price, those that cost more on spot than on
    demand (one of the two is wrong), machines with a part of a processor or GPU, and accelerators that are no GPU.
    Raises ConfigError for what is no catalog, or has no price at all.
    """
    left_out = Counter[str]()
    rows = [row for row in _rows(text, source) if _fits(row, left_out)]
    if provider == "gcp":
        rows = list(_google(rows, left_out))
    zones = defaultdict[tuple[str, str], list[Row]](list)
    for row in rows:
        zones[row.instance_type, row.region].append(row)
    if not zones:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise _wrong("the file", f"has no machine with a price ({reasons or 'no row'})", source)
    return Machines([_region(found) for found in zones.values()], left_out)


def _rows(text: str, source: str) -> Iterator[Row]:
    """Each row as the catalog has it; a price of 0 stands for none."""
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        missing = sorted(set(COLUMNS) - set(reader.fieldnames or ()))
        if missing:
            raise _wrong("the file", f"is no catalog: it has no column {', '.join(missing)}", source)
        for cells in reader:
            line = f"line {reader.line_num}"
            if None in cells or None in cells.values():
                raise _wrong(line, f"must have {len(reader.fieldnames or ())} cells", source)
            names = {name: cells[name].strip() for name in ("InstanceType", "AcceleratorName", "Region")}
            names["AvailabilityZone"] = (cells.get("AvailabilityZone") or "").strip()
            for name, value in names.items():
                if value and not _NAME.fullmatch(value):
                    raise _wrong(f"{line}, {name}", "has a character that no name has", source)
            numbers = {name: _number(cells[name], f"{line}, {name}", source) for name in COLUMNS[2:6]}
            yield Row(
                names["InstanceType"],
                names["AcceleratorName"],
                _GPUS.get(names["InstanceType"], numbers["AcceleratorCount"]),
                numbers["vCPUs"],
                names["Region"],
                names["AvailabilityZone"],
                numbers["Price"],
                numbers["SpotPrice"] or None,
            )
    except csv.Error as error:
        raise _wrong(f"line {reader.line_num}", f"is no CSV ({error})", source) from error


def _number(text: str, field: str, source: str) -> float:
    """A number of a cell, 0 where it is empty."""
    try:
        number = float(text or 0)
    except ValueError:
        number = math.nan
    if not 0 <= number <= MOST_USD_PER_HOUR:
        raise _wrong(field, f"must be between 0 and {MOST_USD_PER_HOUR:g}", source, text)
    return number


def _wrong(field: str, rule: str, source: str, value: object = MISSING) -> ConfigError:
    return ConfigError(field, value, rule, "the price table stays as it was; give another --catalog", source)


def _fits(row: Row, left_out: Counter[str]) -> bool:
    reason = None
    if not row.usd_per_hour:
        reason = "without a price"
    elif (row.spot_usd_per_hour or 0) > row.usd_per_hour * (1 + _ROUNDED):
        reason = "that cost more on spot than on demand"
    elif not row.region:
        reason = "without a region"
    elif row.gpu_model and _NO_GPU.search(row.gpu_model):
        reason = "with accelerators that are no GPUs"
    elif row.gpus % 1 or row.vcpus % 1 or (row.instance_type and not row.vcpus):
        reason = "with a part of a GPU or processor, or without one"
    left_out.update([reason] if reason else ())
    return reason is None


def _google(rows: Sequence[Row], left_out: Counter[str]) -> Iterator[Row]:
    """Machines with the price of the GPUs that they bring along, if these have a price in the zone."""
    gpus = {(row.gpu_model, int(row.gpus), row.zone): row for row in rows if not row.instance_type}
    for row in (row for row in rows if row.instance_type):
        match = _GOOGLE_TYPE.match(row.instance_type)
        if match is None or row.gpus:
            yield row
            continue
        family, number = match["family"], int(match["number"])
        count = _GPUS_BY_VCPUS[family].get(number, 0) if family in _GPUS_BY_VCPUS else number
        found = gpus.get((_GOOGLE[family], count, row.zone))
        if found is None:
            left_out["whose GPUs have no price in the zone"] += 1
            continue
        parts = row.spot_usd_per_hour, found.spot_usd_per_hour
        spot = None if None in parts else math.fsum(part for part in parts if part is not None)
        usd = math.fsum((row.usd_per_hour, found.usd_per_hour))
        yield replace(row, gpu_model=found.gpu_model, gpus=count, usd_per_hour=usd, spot_usd_per_hour=spot)


def _region(zones: Sequence[Row]) -> Row:
    """The zones of a region as one."""
    spot = [row.spot_usd_per_hour for row in zones if row.spot_usd_per_hour is not None]
    first = zones[0]
    return replace(
        first,
        gpu_model=_GPU_MODELS.get(first.gpu_model, first.gpu_model) if first.gpus else "",
        zone=" ".join(sorted({row.zone for row in zones if row.zone})),
        usd_per_hour=round(statistics.median_high(row.usd_per_hour for row in zones), 6),
        spot_usd_per_hour=round(statistics.median_high(spot), 6) if spot else None,
    )

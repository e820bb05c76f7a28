"""Which batch sizes of a training function ran out of memory, by the user's own key.

Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainers.config.function import flat
from trainers.errors import MISSING, ConfigError

BATCH_KEYS = (
    *(
        "batch_size",
        "train_batch_size",
        "global_batch_size",
        "batch_size_per_worker",
        "batch_size_per_gpu",
    ),
    *(
        "per_device_train_batch_size",
        "per_device_batch_size",
        "microbatch_size",
        "micro_batch_size",
        "bs",
    ),
)
"""Names of a batch size that are known; `Tuner(batch_key=...)` gives any other."""

_NO_MEMORY = {
    "lr",
    "learning_rate",
    "weight_decay",
    "momentum",
    "betas",
    "eps",
    "warmup",
    "seed",
}
"""Names of numbers that take no memory whatever they are; any other may be a width or a
share of layers.
"""


@dataclass(frozen=True)
class Sized:
    """A training function with a configuration: how large its batch is, and all else
    that memory may depend on.
    """

    key: str
    size: int
    rest: str
    """Everything else that memory may depend on."""


def sized(
    function: str, config: Mapping[str, Any], key: str | None = None
) -> Sized | None:
    """Return the size of a function's batch, None where its configuration has none.

    `key` names it, with dots where it lies deeper; ConfigError where that is no whole
    number.
    """
    known = flat(config)
    names = (
        [name for name in known if name.rpartition(".")[2] in BATCH_KEYS]
        if key is None
        else [key]
    )
    size = known.get(names[0], MISSING) if len(names) == 1 else MISSING
    if type(size) is not int or size < 1:
        if key is not None:
            rule = "must name a whole number of train_loop_config"
            fix = f"it has {', '.join(known) or 'nothing'}"
            raise ConfigError("batch_key", key, rule, fix)
        return None
    others = {
        name: value
        for name, value in known.items()
        if name != names[0] and name.rpartition(".")[2] not in _NO_MEMORY
    }
    return Sized(
        names[0],
        size,
        f"{function} {sorted(others.items(), key=lambda item: item[0])!r}",
    )


class Misfits:
    """What has run out of memory so far."""

    def __init__(self) -> None:
        self._smallest: dict[str, int] = {}

    def note(self, one: Sized) -> None:
        """Note that a size ran out of memory."""
        self._smallest[one.rest] = min(one.size, self._smallest.get(one.rest, one.size))

    def why_not(self, one: Sized) -> str | None:
        """Why a size is not worth a try, in words; None where it is."""
        failed = self._smallest.get(one.rest)
        if failed is None or one.size < failed:
            return None
        return f"{one.key} {one.size} is not tried: {failed} ran out of memory with the same configuration"

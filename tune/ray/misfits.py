"""Which batch sizes of a training function ran out of memory, by the user's own key.

Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainers.config.function import flat
from trainers.errors import MISSING, ConfigError

BATCH_KEYS = {
    "batch_size",
    "train_batch_size",
    "global_batch_size",
    "batch_size_per_worker",
    "batch_size_per_gpu",
    "per_device_train_batch_size",
    "per_device_batch_size",
    "microbatch_size",
    "micro_batch_size",
    "bs",
}
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
"""Numbers that take no memory; any other may be a width or a share of layers."""


@dataclass(frozen=True)
class Sized:
    """How large the batch of a training function is, with a configuration."""

    key: str
    size: int
    rest: str
    """Everything else that memory may depend on."""

    def why_not(self, misfit: int | None) -> str | None:
        """Say why it is not worth a try beside a size that ran out of memory."""
        if misfit is None or self.size < misfit:
            return None
        return f"{self.key} {self.size} is not tried: {misfit} ran out of memory with the same configuration"


def sized(
    function: str, config: Mapping[str, Any], key: str | None = None
) -> Sized | None:
    """Return the size of a function's batch, None where its configuration has none.

    Args:
        function: The name of the training function.
        config: What the function is called with.
        key: The size's name, with dots where it lies deeper; None: looked for.

    Raises:
        ConfigError: `key` names no whole number.
    """
    known = flat(config)
    names = [name for name in known if name.rpartition(".")[2] in BATCH_KEYS]
    if key is not None:
        names = [key]
    size = known.get(names[0], MISSING) if len(names) == 1 else MISSING
    if type(size) is not int or size < 1:
        if key is not None:
            rule = "must name a whole number of train_loop_config"
            fix = f"it has {', '.join(known) or 'nothing'}"
            raise ConfigError("batch_key", key, rule, fix)
        return None
    others = sorted(
        (name, value)
        for name, value in known.items()
        if name != names[0] and name.rpartition(".")[2] not in _NO_MEMORY
    )
    return Sized(names[0], size, f"{function} {others!r}")

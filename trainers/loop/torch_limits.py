"""What torch cannot do of what a run asks for, and says only once it is on its way: as a sentence about the setting."""

import contextlib
from collections.abc import Iterator

from trainers.config import TrainConfig
from trainers.errors import ConfigError

_DOUBLE_BACKWARD = "does not currently support double backward"  # aot_autograd's words


@contextlib.contextmanager
def torch_limits_explained(config: TrainConfig) -> Iterator[None]:
    """Raise ConfigError, which names the setting, in place of torch's error for a known limit met inside.

    Limits that forward alone can meet, and whose sentence needs the batch, are explained by ForwardPass.
    """
    try:
        yield
    except RuntimeError as error:
        if config.compile != "off" and _DOUBLE_BACKWARD in str(error):  # else the task compiles something itself
            rule = (
                "cannot train a loss that has a gradient in it, such as a gradient penalty: torch does not "
                "differentiate the backward pass of a compiled model"
            )
            raise ConfigError("compile", config.compile, rule, "set `compile: off`") from error
        raise

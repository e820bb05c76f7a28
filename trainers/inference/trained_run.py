"""What `trainers.train` returns: how the run ended, and what it left."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from trainers.devices.device import resolve_device
from trainers.devices.group import Group
from trainers.inference.passes import Inference, load_trained, run_spec
from trainers.measure.result import RunResult
from trainers.measure.run_log import read_log
from trainers.model.precision import resolve_precision
from trainers.redaction import redact
from trainers.storage import Storage

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False)
class TrainedRun(RunResult):
    """A run, as its `result.json` has it, and its directory."""

    uri: str = ""
    """The run's directory."""

    def __repr__(self) -> str:
        return redact(f"{self}\n  in {self.uri}")

    def log(self) -> list[dict[str, Any]]:
        """Return the run's log: mean losses, evaluations, and what else was noted, in order."""
        return read_log(Storage(self.uri))

    def dataframe(self) -> pd.DataFrame:
        """Return the log with a row a record; needs pandas."""
        import pandas as pd

        return pd.DataFrame(self.log())

    def model(self, checkpoint: str = "newest") -> nn.Module:
        """Return the trained model, in evaluation mode, on the device that this process has.

        `checkpoint` is newest, best or step-N. Raises ConfigError where there is none.
        """
        job = Inference(**asdict(run_spec(self.uri, {}, None)), split="val", which=checkpoint, out=None)
        device = resolve_device(job.config.device)
        precision = resolve_precision(job.config.precision, device)
        return load_trained(job.load_task(), job.config, Group(0, 1, device), precision, job)[2]

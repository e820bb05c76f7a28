"""A trial's driver, in a process of its own: a function that makes a TorchTrainer and calls `fit` (Ray)."""

from typing import Any

from ray import cloudpickle

from tune.forks.child import Channel, TrialStopped
from tune.forks.function import as_new_process
from tune.ray import trainer
from tune.ray.controller import reports_of_trial
from tune.ray_internals import get_session, set_session


class DriverSession:
    """Tune's session in the process of a driver: asks that of the trial's actor."""

    def __init__(self, channel: Channel) -> None:
        self.ask = channel.call

    def __getattr__(self, name: str) -> Any:
        return self.ask("attribute", name)

    def report(self, metrics: dict[str, Any], checkpoint: Any = None) -> None:
        """As Tune's."""
        self.ask("report", metrics, checkpoint=checkpoint)

    def _get_or_create_inter_actor_queue(self) -> Any:
        return Reports()


class Reports:
    """Stands for the queue of the trial's actor, by which a TuneReportCallback reports, until the callback is there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return reports_of_trial, ()


def run_driver(channel: Channel, driver: bytes, config: dict[str, Any]) -> Any:
    """Call a pickled driver with a trial's configuration; returns what it returns."""
    as_new_process([])
    set_session(DriverSession(channel))
    try:
        return (False, cloudpickle.loads(driver)(config))
    except Exception as error:
        return (True, error)


class Asked:
    """What a driver's process asks of its trial's actor."""

    def __init__(self, pool: Any, zygote: str, batch_key: str | None) -> None:
        self._pool, self._zygote, self._batch_key = pool, zygote, batch_key

    def fit(self, run: trainer.Run) -> Any:
        """Train in a lane."""
        return trainer.fit(run, self._pool, self._zygote, self._batch_key)

    def attribute(self, name: str) -> Any:
        """What Tune's session has by a name."""
        return getattr(get_session(), name)

    def report(self, metrics: dict[str, Any], checkpoint: Any) -> None:
        """As Tune's; raises TrialStopped where the search has stopped the trial, or lets it pause."""
        found = get_session()
        assert found is not None
        try:
            found.report(metrics, checkpoint=checkpoint)
        except SystemExit:
            raise TrialStopped(0) from None

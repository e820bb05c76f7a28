"""Loss curves of runs of the recipes' settings."""

from tests.unit.test_recipes import SETTINGS
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.launch.local import LocalContext
from trainers.loop.fit import fit
from trainers.storage import Storage


class Reports(LocalContext):
    """Keeps the loss of each step."""

    stop_after: int | None = None
    """Steps of this start after which it is asked to stop."""

    def observe(self, figures):
        self.losses = [*getattr(self, "losses", []), figures["loss"]]

    def should_stop(self, elapsed_s):
        return len(getattr(self, "losses", [])) + 1 == self.stop_after


def losses(rank, world_size, task, changes, path=None, stop_after=None):
    """Of each step that this start makes; with a `path` it goes on from there."""
    tree = {
        "task": "x:Y",
        "device": "cpu",
        "log_every_steps": 1,
        **SETTINGS,
        **changes,
    }
    context = Reports(
        Storage(path) if path else None,
        "spawn",
        rank,
        world_size,
        rank,
        world_size,
    )
    context.stop_after = stop_after
    fit(task, build(TrainConfig, tree, "test"), context)
    return getattr(context, "losses", [])

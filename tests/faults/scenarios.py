"""What is run: seven commands of the product, all on the same small task."""

import os
import secrets
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

REPOSITORY = Path(__file__).parents[2]
WORKSPACE = REPOSITORY / "build" / "faults"
"""Unbroken runs, and the journals of campaigns."""
SITE = Path(__file__).parent / "site"
STEPS = 180
INTERVAL = 5
TRIALS = 6
TRIAL_STEPS = 60
HANG_TIMEOUT_S = 15.0
_OUTSIDE = (
    "RAY_",
    "PACELINE_",
    "PYTEST_",
    "RANK",
    "WORLD_SIZE",
    "MASTER_",
    "LOCAL_",
    "TORCHELASTIC_",
)
_TRAIN = {
    "task": "tests.faults.task:Faulty",
    "task_dir": str(REPOSITORY),
    "max_steps": STEPS,
    "global_batch_size": 12,
    "log_every_steps": 10,
    "optimizer": {"name": "adamw", "lr": 0.01},
    "evaluate": {"every_steps": 45},
    "checkpoint": {"every_steps": INTERVAL},
    "failure": {"hang_timeout_s": HANG_TIMEOUT_S},
    "device": "cpu",
}


@dataclass(frozen=True)
class Scenario:
    """One command."""

    name: str
    kind: Literal["run", "sweep"]
    root: str
    """The role of the process that the command line starts."""
    world: int
    roles: tuple[str, ...]
    """Those that get signals."""
    train: dict[str, Any] = field(default_factory=dict)
    sweep: dict[str, Any] | None = None
    launch: tuple[str, ...] = ("-m", "trainers")
    on_s3: bool = False

    @property
    def steps(self) -> int:
        """The last step of a run, or of each trial."""
        return STEPS if self.kind == "run" else TRIAL_STEPS

    @property
    def on_ray(self) -> bool:
        """Whether it starts a cluster of its own."""
        return "raylet" in self.roles

    def command(self, directory: Path, storage: str) -> list[str]:
        """The command line, whose file is written into the directory; the same
        one goes on with the run.
        """
        tree = {**_TRAIN, **self.train}
        place = {"name": "run", "storage_path": storage}
        if self.sweep is not None:
            trial = {
                key: value
                for key, value in tree.items()
                if key not in ("checkpoint", "launcher")
            }
            tree = {"train": trial | {"max_steps": TRIAL_STEPS}, **self.sweep}
        file = directory / "command.yaml"
        file.write_text(yaml.safe_dump(tree | place))
        return [sys.executable, *self.launch, str(file)]

    def environment(self, directory: Path) -> dict[str, str]:
        """The environment of the command: that of this process, without what a
        test session adds.
        """
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(_OUTSIDE)
        }
        return kept | {
            "PACELINE_FAULTS": str(directory / "plan.json"),
            "PYTHONPATH": f"{SITE}{os.pathsep}{REPOSITORY}",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(directory / "tmp"),
            "RAY_TMPDIR": str(directory / "r"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
        }


_CLUSTER = ("gcs", "raylet")
_LANES = ("driver", "worker", "trial actor", "mailbox", *_CLUSTER)
_ALONE = {"launcher": "local", "task_args": {"pause_s": 0.005}}
_TWO = {"scaling": {"num_workers": 2}, "task_args": {"pause_s": 0.005}}
_SWEEP = {
    "space": {"task_args.trial": list(range(TRIALS))},
    "objective": {"metric": "val_loss"},
    "lanes": 2,
}
_PAUSED = {"task_args": {"pause_s": 0.02}}
SCENARIOS = {
    one.name: one
    for one in (
        Scenario("local", "run", "worker", 1, ("worker",), _ALONE),
        Scenario(
            "loader",
            "run",
            "worker",
            1,
            ("worker", "loader"),
            {**_ALONE, "data": {"num_workers": 1, "resident": False}},
        ),
        Scenario("s3", "run", "worker", 1, ("worker",), _ALONE, on_s3=True),
        Scenario(
            "spawn",
            "run",
            "driver",
            2,
            ("driver", "worker"),
            {**_TWO, "launcher": "spawn"},
        ),
        Scenario(
            "torchrun",
            "run",
            "torchrun",
            2,
            ("torchrun", "worker"),
            _TWO,
            launch=(
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                "-m",
                "trainers",
            ),
        ),
        Scenario(
            "ray",
            "run",
            "driver",
            2,
            ("driver", "worker", "controller", *_CLUSTER),
            {**_TWO, "launcher": "ray", "task_args": {"pause_s": 0.02}},
        ),
        Scenario(
            "sweep",
            "sweep",
            "driver",
            1,
            _LANES,
            _PAUSED,
            _SWEEP,
            ("-m", "tune"),
        ),
    )
}

"""A run that goes on until it is stopped, its processes, and what they leave."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch.distributed as dist

from tests.distributed.processes import run_command
from tests.specs import BASE, REPOSITORY
from tests.tasks import Blobs
from tests.waits import HANG_S, until
from trainers.config.yaml import dump_yaml


class Endless(Blobs):
    """Says which processes train; where there is a file `stuck`, rank 1 stops,
    and rank 0 waits for its gradients.
    """

    def __init__(self, directory):
        super().__init__(pause_s=0.02)
        self.directory = Path(directory)
        self.steps = 0

    def forward(self, model, batch):
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.steps += model.training
        if self.steps > 20:
            (self.directory / f"{rank}-{os.getpid()}").touch()
            if rank == 1 and self.directory.with_name("stuck").exists():
                time.sleep(3600)
        return super().forward(model, batch)


class Forked(multiprocessing.get_context("forkserver").Process):
    """One that has imported torch already, with what a Popen is asked here."""

    def poll(self):
        return self.exitcode

    def wait(self, timeout=None):
        self.join(timeout)
        return self.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)


class Command:
    """`python -m trainers` on an endless run in a directory, with a directory
    of its own for temporary files.
    """

    def __init__(self, directory, launcher, *options, forked=False, **changes):
        self.directory = directory
        self.output = Path(tempfile.mkdtemp(dir=directory))
        self.launcher = launcher
        self.run = directory / "runs" / "run"
        self.training = directory / "training"
        self.temporary = directory / "tmp"
        for made in (self.training, self.temporary):
            made.mkdir(exist_ok=True)
        task = {
            "task": "tests.commands.endless:Endless",
            "task_args": {"directory": str(self.training)},
        }
        never = {
            "max_steps": 10**6,
            "checkpoint": {"every_steps": 10**6},
            "evaluate": {"every_steps": 10**6},
        }
        workers = 1 if launcher == "local" else 2
        own = {
            "launcher": "spawn" if launcher == "torchrun" else launcher,
            "scaling": {"num_workers": workers},
        }
        tree = {
            **BASE,
            **task,
            **never,
            **own,
            "device": "cpu",
            "storage_path": str(directory / "runs"),
            **changes,
        }
        (directory / "train.yaml").write_text(dump_yaml(tree))
        trainers = ["-m", "trainers", str(directory / "train.yaml"), *options]
        if launcher == "torchrun":
            trainers = [
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                *trainers,
            ]
        environment = os.environ | {"TMPDIR": str(self.temporary)}
        environment.pop("RAY_ADDRESS", None)
        self.family = []
        if forked:
            args = (trainers[1], trainers[2:], str(REPOSITORY), environment)
            self.process = Forked(
                target=run_command, args=(*args, str(self.output))
            )
            self.process.start()
            return
        self.process = subprocess.Popen(
            [sys.executable, *trainers],
            cwd=REPOSITORY,
            env=environment,
            stdout=(self.output / "out").open("w"),
            stderr=(self.output / "err").open("w"),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def said(self):
        """What its processes have printed."""
        return "".join(
            file.read_text() for file in sorted(self.output.iterdir())
        )

    def until(self, condition):
        """Wait, and note what it has started."""
        until(condition, lambda: self.said, every_s=0.02)
        if self.process.poll() is None:
            self.family = psutil.Process(self.process.pid).children(
                recursive=True
            )

    def trains(self):
        """Wait until every rank trains."""
        ranks = 1 if self.launcher == "local" else 2

        def do_all():
            assert self.process.poll() is None, self.said
            return len(list(self.training.iterdir())) == ranks

        self.until(do_all)
        return self

    def tell(self, *numbers):
        """Send signals to the process that was started, and to no other."""
        for number in numbers:
            self.process.send_signal(number)

    def ends(self):
        """Wait until it and all that it has started are gone; its exit code."""
        code = self.process.wait(HANG_S)
        _, left = psutil.wait_procs(self.family, timeout=HANG_S)
        assert not left, f"{left} outlive the command:\n{self.said}"
        return code

    def kill(self):
        """At the end of a test, whatever came of it."""
        self.process.kill()
        self.process.wait()
        for process in self.family:
            if process.is_running():
                process.kill()

    def kept(self):
        """The checkpoints that are whole."""
        return sorted(
            path.parent
            for path in self.run.glob("checkpoints/*/manifest.json")
        )

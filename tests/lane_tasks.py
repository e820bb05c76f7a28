"""Tasks that are hard on a lane: memory that depends on the precision, and
poison for whatever trial comes next.
"""

import atexit
import builtins
import ctypes
import gc
import io
import locale
import logging
import math
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.tasks import Blobs

COUNT = 0
"""Module state, as careless tasks keep it."""
LEAKED = []
POISON = {
    "umask": lambda: os.umask(0o777),
    "priority": lambda: os.nice(5),
    "affinity": lambda: os.sched_setaffinity(
        0, {min(os.sched_getaffinity(0))}
    ),
    "descriptors": lambda: LEAKED.extend(
        os.open("/dev/null", os.O_RDONLY) for _ in range(500)
    ),
    "few descriptors": lambda: resource.setrlimit(
        resource.RLIMIT_NOFILE, (256, 256)
    ),
    "locale": lambda: locale.setlocale(locale.LC_ALL, "C"),
    "time zone": lambda: (os.environ.update(TZ="Asia/Tokyo"), time.tzset()),
    "collection": gc.disable,
    "no errors": lambda: os.close(2),
    "no input": lambda: os.close(0),
    "print": lambda: setattr(sys, "stdout", io.StringIO()),
    "trace": lambda: sys.settrace(lambda *_: None),
    "audit": lambda: sys.addaudithook(lambda *_: None),
    "switch interval": lambda: sys.setswitchinterval(1.0),
    "import": lambda: sys.meta_path.clear(),
    "builtins": lambda: setattr(builtins, "sum", max),
    "random": lambda: setattr(random, "random", lambda: 0.5),
    "at exit": lambda: atexit.register(time.sleep, 3600),
    "lost directory": lambda: (
        os.chdir(directory := tempfile.mkdtemp()),
        Path(directory).rmdir(),
    ),
    "temporary": lambda: setattr(tempfile, "tempdir", "/nowhere"),
    "logging": lambda: logging.disable(logging.CRITICAL),
    "loader": lambda: setattr(
        torch.utils.data.DataLoader, "__iter__", lambda self: iter(())
    ),
    "step": lambda: setattr(
        torch.optim.SGD, "step", lambda self, closure=None: None
    ),
    "backward": lambda: setattr(Tensor, "backward", lambda self, **_: None),
    "start method": lambda: torch.multiprocessing.set_start_method(
        "spawn", force=True
    ),
    "exit": lambda: os._exit(0),
    "system exit": lambda: sys.exit(3),
    "interrupt": lambda: signal.default_int_handler(signal.SIGINT, None),
    "abort": os.abort,
    "crash": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill group": lambda: os.killpg(0, signal.SIGKILL),
    "alarm": lambda: (
        signal.setitimer(signal.ITIMER_REAL, 0.01),
        time.sleep(3600),
    ),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}
"""What takes a line; a method of Poison takes more."""


class Limited(Blobs):
    """Runs out of memory above `fp32_fits` samples, above `bf16_fits` under
    autocast; each time leaves a line.
    """

    def __init__(self, fp32_fits=math.inf, bf16_fits=math.inf, log="", **args):
        super().__init__(**args)
        self.limits = {False: fp32_fits, True: bf16_fits}
        self.log = Path(log)

    def forward(self, model, batch):
        half = torch.is_autocast_enabled("cpu")
        size = len(batch[0])
        if model.training and size > self.limits[half]:
            with self.log.open("a") as file:
                file.write(f"{'bf16' if half else 'fp32'} {size}\n")
            raise torch.OutOfMemoryError(
                f"injected: {size} samples, {self.limits[half]} fit"
            )
        return super().forward(model, batch)


class Counted(Limited):
    """Adds a line to a file for every step that is trained; in one of them it
    waits for a `gate`: a directory, which stays, or a file, which lets one
    trial through.
    """

    def __init__(self, steps, gate="", waits_in=5, **args):
        super().__init__(**args)
        self.steps = Path(steps)
        self.gate = Path(gate)
        self.waits_in = waits_in

    def after_step(self, model, step):
        with self.steps.open("a") as file:
            file.write(f"{step}\n")
        while step == self.waits_in and not self.gate.exists():
            time.sleep(0.05)
        if step == self.waits_in and self.gate.is_file():
            self.gate.unlink()


class Poison(Blobs):
    """Leaves its process as no trial should find it; a poison that it has
    survived is a line of a file.

    `drawn` samples of its data depend on every generator.
    """

    def __init__(self, poison="", log="", drawn=0, after="", **args):
        super().__init__(**args)
        self.poison = poison
        self.log = log
        self.drawn = drawn

    def dataset(self, split):
        global COUNT
        data = super().dataset(split)
        if (
            self.drawn
        ):  # without a generator of its own: what a fresh process draws
            data.tensors[0][: self.drawn] += torch.randn(
                self.drawn, self.features
            )
            data.tensors[0][0] += COUNT
        if split == "val":
            COUNT += 1
            if self.poison:
                log = os.open(
                    self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
                )
                act = POISON.get(self.poison) or getattr(
                    self, f"_{self.poison}"
                )
                act()
                os.write(log, f"{self.poison}\n".encode())
        return data

    def _flags(self):
        torch.set_num_threads(2)
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.fp32_precision = "tf32"
        torch.set_flush_denormal(True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.autograd.set_detect_anomaly(True)
        torch.set_autocast_dtype("cpu", torch.float16)
        torch.set_autocast_cache_enabled(False)
        torch.backends.mkldnn.set_flags(False)

    def _grad(self):
        torch.set_default_device("meta")
        torch.set_default_device("cpu")
        threading.stack_size(1 << 20)

    def _rng(self):
        torch.manual_seed(99)
        random.seed(99)
        np.random.seed(99)

    def _hooks(self):
        nn.modules.module.register_module_forward_hook(
            lambda module, args, outputs: outputs * 0.5
        )
        register_optimizer_step_post_hook(lambda *args: None)
        F.cross_entropy = lambda *args, **kwargs: torch.zeros(
            (), requires_grad=True
        )
        nn.Linear.forward = lambda self, inputs: inputs @ self.weight.T
        torch.tanh = torch.sigmoid

    def _process(self):
        os.environ["OMP_NUM_THREADS"] = "7"
        os.environ["POISON"] = "1"
        os.chdir("/")
        sys.path.insert(0, "/nowhere")
        sys.setrecursionlimit(5000)
        warnings.simplefilter("error")
        np.seterr(all="raise")

    def _modules(self):
        sys.modules["json"] = types.ModuleType("json")

    def _thread(self):
        threading.Thread(
            target=time.sleep, args=(3600,), name="leaked"
        ).start()

    def _child(self):
        torch.multiprocessing.get_context("fork").Process(
            target=time.sleep, args=(3600,)
        ).start()

    def _fork(self):
        if os.fork() == 0:
            time.sleep(3600)

    def _daemon(self):
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(3600)"],
            start_new_session=True,
        )

    def _handlers(self):
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)

    def _output(self):
        for _ in range(100):
            print("x" * 10**5)
        os.close(1)

    def _leak(self):
        LEAKED.append(torch.ones(2**27))


class Signed(Blobs):
    """Writes its seed once it trains."""

    def __init__(self, file, **args):
        super().__init__(**args)
        self.file = Path(file)

    def sign(self):
        with self.file.open(
            "a"
        ) as file:  # the loop has seeded torch with the trial's seed by now
            file.write(f"{torch.initial_seed()}\n")

    def model(self):
        self.sign()
        return super().model()

"""A lane's process after training functions of strangers: as it was, or said not to be."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.waits import HANG_S

REPOSITORY = Path(__file__).parents[2]
PARCEL = {
    "core.py": "from parcel.registry import REGISTRY\nREGISTRY.append('core')\n",
    "registry.py": "REGISTRY = []\n",
    "late.py": """
import os, parcel
parcel.REGISTRY.append("late")
parcel.SETTINGS["late"] = os.environ["LATE"] = "1"
""",
    "_lazy.py": "def lazy():\n    return 'lazy'\n",
    "__init__.py": """
import collections, sys, threading
from parcel.registry import REGISTRY
from parcel import core
COUNT, NAME, SETTINGS, NESTED, RECENT = 0, None, {}, {"a": {"b": []}}, collections.deque([0], 9)
MODULES = sys.modules
LOCK = threading.Lock()
class Options:
    def __init__(self):
        self.level, self.seen = 0, []
class State:
    shared, kinds = {}, set()
    def method(self):
        return "theirs"
DEFAULT = Options()
def double(value):
    return 2 * value
def __getattr__(name):
    if name != "lazy":
        raise AttributeError(name)
    from parcel._lazy import lazy
    globals()["lazy"] = lazy
    return lazy
""",
}
"""A package that is installed, and keeps all kinds of state."""

PUT_BACK = (
    *("own_globals", "package_containers", "package_objects", "package_code"),
    *("torch_code", "dtype", "modes", "module_hooks", "seeds"),
    *("environment", "gone_directory", "signals", "process", "interpreter", "loggers"),
    *("child_forked", "child_orphaned", "child_of_multiprocessing", "group", "file_of_python", "server"),
)
REPORTED = {
    "package_replaced": "the module parcel was replaced",
    "thread": "still running: thread leaked",
    "raw_file": f"still open: {REPOSITORY / 'tests/foreign_functions.py'}",
    "standard_output": "the file of standard output: ",
    "tensor": "50.0 MiB are still held, by 1 tensors or arrays",
    "native_memory": "MiB of the host's memory are still held",
}
INNOCENT = ("plain", "loader_with_workers", "accelerate_bf16", "transformers_model")

# A process of its own: what is poisoned here must not reach the suite.
SCRIPT = """
import asyncio, builtins, gc, importlib, json, logging, math, multiprocessing, os, resource, signal, socket, sys
import threading, warnings
from pathlib import Path
repository, site, *names = sys.argv[1:]
sys.path[:0] = [repository, site]
import numpy, psutil, torch
import torch.distributed as dist
import tune.lanes.module_state as module_state
from tune.lanes.leftovers import adopt_orphans
from tune.lanes.process_state import Baseline
module_state._INSTALLED += (site,)

def state():
    import parcel
    rng = torch.get_rng_state().sum().item(), numpy.random.get_state()[1].sum().item()
    shown = dict(
        parcel=[parcel.COUNT, str(parcel.NAME), hasattr(parcel, "EXTRA"), list(parcel.REGISTRY), str(parcel.NESTED)],
        classes=[dict(parcel.State.shared), len(parcel.State.kinds), list(parcel.RECENT), parcel.State().method()],
        objects=[parcel.DEFAULT.level, len(parcel.DEFAULT.seen), parcel.double(2)],
        leak=[hasattr(owner, "leak") for owner in (torch, numpy, builtins, torch.nn.Linear)],
        code=[math.pi, hasattr(torch, "helper"), torch.nn.functional.cross_entropy.__module__],
        torch=[str(torch.get_default_dtype()), str(torch.get_default_device()), torch.is_grad_enabled()],
        stacks=[torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()],
        flags=[torch._tensor_str.PRINT_OPTS.precision, torch._C._is_multithreading_enabled()],
        always=torch.is_warn_always_enabled(), benchmark=torch.backends.cudnn.benchmark,
        configs=[torch._dynamo.config.suppress_errors, torch._inductor.config.max_autotune],
        saved=str(torch._C._autograd._top_saved_tensors_default_hooks(True)),
        hooks=len(torch.nn.modules.module._global_forward_hooks), rng=rng,
        environment=sorted(os.environ.items()), directory=os.readlink("/proc/self/cwd"),
        signals=[str(signal.getsignal(n)) for n in (signal.SIGUSR1, signal.SIGTERM)],
        blocked=[str(signal.pthread_sigmask(signal.SIG_BLOCK, [])), signal.getitimer(signal.ITIMER_REAL)[1] > 0,
                 signal.getitimer(signal.ITIMER_REAL)[0] > 0],
        umask=Path("/proc/self/status").read_text().split("Umask:")[1][:6],
        limits=resource.getrlimit(resource.RLIMIT_NOFILE),
        affinity=[len(os.sched_getaffinity(0)), multiprocessing.get_start_method(True)],
        policy=str(asyncio.get_event_loop_policy()),
        interpreter=[len(sys.path), len(sys.meta_path), str(sys.gettrace()), str(threading.gettrace()), sys.argv[0],
                     str(sys.excepthook), len(gc.callbacks), gc.get_threshold(), gc.isenabled(), len(warnings.filters)],
        loggers=[len(logging.getLogger(name).handlers) for name in ("", "torch.distributed")],
        levels=[logging.getLogger("of.mine").level, len(logging.getLogger("of.mine").filters)],
        children=sorted(one.pid for one in psutil.Process().children(True)),
        group=dist.is_initialized(),
        files=sorted(one.path for one in psutil.Process().open_files()),
        listening=sum(one.status == "LISTEN" for one in psutil.Process().net_connections()),
    )
    return {name: str(value) for name, value in shown.items()}

def function(name):
    return getattr(importlib.import_module("tests.foreign_functions"), name)

import parcel
adopt_orphans()
baseline = Baseline(torch.device("cpu"), None)
first = function("train")()
found = {"nothing": baseline.restore(), "before": {}, "spoilt": {}, "after": {}, "left": {}, "cleared": {}, "same": {}}
for name in names:
    before = state()
    undo = function(name)()
    spoilt = None if name in ("modes", "package_replaced") else state()
    left = baseline.restore()
    after = state()
    found["spoilt"][name] = spoilt is None or [key for key in before if before[key] != spoilt[key]]
    found["after"][name] = [f"{key}: {before[key]} {after[key]}" for key in before if before[key] != after[key]]
    found["left"][name] = left
    if undo is not None:
        undo()
        del undo
        baseline.restore()
    found["same"][name] = function("train")() == first
    found["cleared"][name] = baseline.restore()
print(json.dumps(found), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("poisons")
    site = directory / "site"
    (site / "parcel").mkdir(parents=True)
    for name, text in PARCEL.items():
        (site / "parcel" / name).write_text(text)
    names = (*PUT_BACK, *REPORTED, *INNOCENT, *INNOCENT)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(REPOSITORY), str(site), *names],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        cwd=directory,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", PUT_BACK)
def test_what_can_be_put_back_is(found: dict[str, Any], name: str) -> None:
    assert found["spoilt"][name] or name == "own_globals", "the poison does nothing"
    assert not found["after"][name]
    assert not found["left"][name]


@pytest.mark.parametrize("name", REPORTED)
def test_what_cannot_be_put_back_is_said(found: dict[str, Any], name: str) -> None:
    assert any(REPORTED[name] in words for words in found["left"][name])


@pytest.mark.parametrize("name", [*PUT_BACK, *REPORTED, *INNOCENT])
def test_the_next_trial_is_as_the_first(found: dict[str, Any], name: str) -> None:
    assert found["same"][name]
    assert not found["cleared"][name]


@pytest.mark.parametrize("name", INNOCENT)
def test_an_innocent_function_leaves_nothing(found: dict[str, Any], name: str) -> None:
    """Each has run twice in the process."""
    assert not found["nothing"]
    assert not found["left"][name]

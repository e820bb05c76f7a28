"""A lane's process after trials that poison it: as it was, or said not to be."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.waits import HANG_S

REPOSITORY = Path(__file__).parents[2]

# A process of its own: what is poisoned here must not reach the suite.
SCRIPT = """
import json, sys
from functools import partial
import torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
import trainers.loop.fit
from tune.lanes.process_state import Baseline

dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/rendezvous", rank=0, world_size=1)
baseline = Baseline(torch.device("cpu"), [sys.argv[1]])

def curve():
    from tests import lane_tasks
    task = lane_tasks.Poison(drawn=5)
    data = task.dataset("val").tensors
    torch.manual_seed(1)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = task.loss(task.forward(model, data), data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

first = curve()
of_cudnn = partial(torch._C._get_fp32_precision_getter, "cuda", "all")
found = {"first": first, "cudnn": [of_cudnn()], "after": {}, "left": {"nothing": baseline.restore()}}
for poison in ("flags", "grad", "rng", "hooks", "process", "child", "modules"):
    from tests import lane_tasks
    task = lane_tasks.Poison([poison])
    try:
        task.dataset("val")
        spoilt = curve() if poison != "grad" else None
    except Exception as error:
        spoilt = repr(error)
    found["left"][poison] = baseline.restore()
    found["cudnn"].append(of_cudnn())
    found["after"][poison] = curve() == first
    found.setdefault("spoilt", {})[poison] = spoilt != first
    baseline.restore()
for poison in ("thread", "group"):
    from tests import lane_tasks
    lane_tasks.Poison([poison]).dataset("val")
    found["left"][poison] = baseline.restore()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    directory = tmp_path_factory.mktemp("reset")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(REPOSITORY), str(directory)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        cwd=directory,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("poison", ["flags", "grad", "rng", "hooks", "process", "child", "modules"])
def test_the_next_trial_is_as_the_first(found: dict[str, dict[str, object]], poison: str) -> None:
    assert found["after"][poison]


def test_the_precision_of_cudnn_is_put_back(found: dict[str, list[str]]) -> None:
    """No curve of a CPU shows it."""
    assert len(set(found["cudnn"])) == 1


def test_the_poison_works(found: dict[str, dict[str, object]]) -> None:
    """Without a reset the next trial would be another."""
    assert {name for name, other in found["spoilt"].items() if other} >= {"flags", "hooks", "process"}


def test_what_can_be_put_back_leaves_nothing(found: dict[str, dict[str, object]]) -> None:
    left = {name: words for name, words in found["left"].items() if name not in ("modules", "thread", "group")}
    assert set(left) >= {"nothing", "flags", "hooks"}
    assert not any(left.values())


def test_what_cannot_be_put_back_is_said(found: dict[str, dict[str, object]]) -> None:
    assert found["left"]["modules"] == ["the module json was replaced"]
    assert found["left"]["thread"] == ["still running: thread leaked"]
    assert "the process group is another" in found["left"]["group"]


def started(target: Any, name: str | None = None, **args: Any) -> threading.Thread:
    """A thread that runs until the process ends."""
    thread = threading.Thread(target=target, name=name, daemon=True, **args)
    thread.start()
    return thread


def of(module: str) -> Any:
    """A function that waits, as if a package had it."""

    def wait(event: Any = None) -> None:
        (event or threading.Event()).wait()

    wait.__module__ = module
    return wait


@pytest.mark.parametrize("module", ["wandb.sdk.wandb_run", "mlflow", "tensorboard.summary.writer", "torch._inductor.x"])
def test_a_library_s_thread_is_harmless_and_the_task_s_own_is_not(module: str) -> None:
    from tune.lanes.leftovers import is_harmless

    assert is_harmless(started(of(module)))
    assert not is_harmless(started(of("task"), module))
    assert not is_harmless(started(of(f"{module.partition('.')[0]}_like"), "wandb"))


def test_real_libraries_threads_are_harmless() -> None:
    from tune.lanes.leftovers import is_harmless

    tqdm, fsspec = pytest.importorskip("tqdm"), pytest.importorskip("fsspec.asyn")
    before = set(threading.enumerate())
    list(tqdm.tqdm(range(2), file=io.StringIO()))
    fsspec.get_loop()
    new = set(threading.enumerate()) - before
    assert all(map(is_harmless, new)), [thread.name for thread in new if not is_harmless(thread)]
    timer = threading.Timer(3600, of("matplotlib.font_manager"))
    timer.start()
    assert is_harmless(timer)
    timer.cancel()
    own = threading.Timer(3600, of("task"))
    own.start()
    assert not is_harmless(own)
    own.cancel()
    assert not is_harmless(started(asyncio.new_event_loop().run_forever, "io")), "fsspec's is known by its name too"


def test_a_poolis_harmless_while_it_waits_for_work() -> None:
    from tune.lanes.leftovers import is_harmless

    held = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        [thread] = pool._threads
        while not is_harmless(thread):  # it is on its way back to the queue
            time.sleep(0.001)
        working = threading.Event()
        pool.submit(lambda: (working.set(), held.wait()))
        working.wait()
        assert not is_harmless(thread)
        held.set()

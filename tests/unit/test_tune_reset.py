"""A lane's process after trials that poison it: as it was, or said not to be."""

import asyncio
import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

# A process of its own: what is poisoned here must not reach the suite.


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

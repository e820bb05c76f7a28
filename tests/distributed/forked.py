"""Worker groups forked from one process that has torch imported: a start costs
a tenth of a second, not five.

Safe as long as this process itself computes nothing: run it as a process of
its own.
"""

import gc
import os
import signal
import sys
import traceback
from datetime import timedelta

import torch
import torch._dynamo  # each worker's loop would import it
import torch.distributed as dist

import trainers.loop.fit  # noqa: F401
from trainers.launch.local import LocalContext


def run_forked(spec, world_size, rendezvous):
    """The run by `world_size` forked workers; how each ended: 0, an exit code,
    or minus the signal.
    """
    workers = []
    for rank in range(world_size):
        sys.stdout.flush()
        if (pid := os.fork()) == 0:
            _worker(spec, rank, world_size, rendezvous)
        workers.append(pid)
    return [
        os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in workers
    ]


def _worker(spec, rank, world_size, rendezvous):
    """Never returns."""
    code = 1
    gc.freeze()  # what is imported: a collection would go through it all
    signal.alarm(600)
    try:
        torch.set_num_threads(1)
        if world_size > 1:
            where = f"file://{rendezvous}"
            dist.init_process_group(
                "gloo", where, timedelta(seconds=300), world_size, rank
            )
        spec.execute(
            LocalContext(
                spec.storage, "spawn", rank, world_size, rank, world_size
            )
        )
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if dist.is_initialized() and code == 0:
            gc.collect()
            dist.destroy_process_group()
        os._exit(code)

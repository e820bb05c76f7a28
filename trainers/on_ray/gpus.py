"""Which GPUs a process of Ray's may use; torch is not imported here (Ray)."""

import os

import ray


def hide_unassigned_gpus() -> None:
    """Let torch see no GPU in a process that Ray has given none.

    Ray 2.60 hides none from it, and all such workers of a node would train on the
    first.

    To be called before torch looks for GPUs.
    """
    if not ray.get_runtime_context().get_accelerator_ids()["GPU"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def own_gpu() -> int:
    """Return the index of this worker's GPU among those it sees; 0 without any."""
    given = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return visible.index(given[0]) if given and given[0] in visible else 0

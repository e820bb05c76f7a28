"""Measure inside the workers of a TorchTrainer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any


def in_workers(
    measure: Callable[[], Any], num_workers: int = 1, gpu: bool = False
) -> Any:
    """Call `measure` on every rank of a TorchTrainer; return rank 0's result.

    Each rank has one CPU and, if `gpu`, one GPU. Ray must be connected.
    """
    import ray
    import ray.train
    from ray.train.torch import TorchTrainer

    @ray.remote(num_cpus=0)
    class Box:
        def put(self, found: Any) -> None:
            self.found = found

        def get(self) -> Any:
            return self.found

    box: Any = Box.remote()

    def worker(config: dict[str, Any]) -> None:
        found = measure()
        if ray.train.get_context().get_world_rank() == 0:
            ray.get(config["box"].put.remote(found))

    resources = {"CPU": 1.0} | ({"GPU": 1.0} if gpu else {})
    scaling = ray.train.ScalingConfig(
        num_workers=num_workers, use_gpu=gpu, resources_per_worker=resources
    )
    with tempfile.TemporaryDirectory(prefix="on-ray-") as storage:
        keep = ray.train.CheckpointConfig(num_to_keep=1)
        config = ray.train.RunConfig(
            storage_path=storage, checkpoint_config=keep
        )
        TorchTrainer(
            worker,
            train_loop_config={"box": box},
            scaling_config=scaling,
            run_config=config,
        ).fit()
    return ray.get(box.get.remote())

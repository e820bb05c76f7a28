"""Join a Ray cluster, and refuse a run that it can never hold.

Environment read: RAY_ADDRESS names the cluster; without it an embedded one starts on this machine.
"""

import logging
import math
import os

import ray
import ray.train
from ray._private import ray_constants

from trainers.config import TrainConfig
from trainers.config.sections import ScalingConfig
from trainers.errors import ConfigError
from trainers.launch.spec import RunSpec
from trainers.on_ray.capacity import capacity

logger = logging.getLogger(__name__)


def connect(show_workers: bool = True) -> None:
    """Join the cluster that RAY_ADDRESS names, or start an embedded one on this machine.

    `show_workers`: what workers print comes to this terminal.
    """
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS") or "local"
    several_nodes = ray_constants.ENABLE_RAY_CLUSTER
    if address == "local":
        # As Ray has it on macOS and Windows: all of its ports, those for metrics too, are on the loopback alone.
        ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        context = ray.init(address=address, log_to_driver=show_workers, logging_level=logging.WARNING)
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = several_nodes
    if url := context.dashboard_url:
        logger.info("dashboard: http://%s (it asks for the token that `ray get-auth-token` prints)", url)


def check_cluster(spec: RunSpec) -> str:
    """Connect, and return the device type of the run's workers; ConfigError where the cluster can never hold them."""
    connect()
    scaling, most = spec.config.scaling, capacity()
    gpu = wants_gpu(spec.config, most)
    for resource, each in _resources(scaling, gpu).items():
        has = most.get(resource, 0.0)
        fits = math.floor(has / each)
        if fits < scaling.min_workers:
            rule = f"must fit on what the cluster can grow to, {has:g} {resource}s at {each:g} a worker"
            fix = f"set it to at most {fits}" if fits else f"add nodes with a {resource}"
            raise ConfigError("scaling.num_workers", scaling.num_workers, rule, fix, spec.source)
    return "cuda" if gpu else "cpu"


def wants_gpu(config: TrainConfig, most: dict[str, float]) -> bool:
    """Return whether workers get GPUs: as configured, or for auto when the cluster has or may get any."""
    use_gpu = config.scaling.use_gpu
    if use_gpu == "auto":
        return config.device in ("auto", "cuda") and most.get("GPU", 0.0) > 0
    return use_gpu


def ray_scaling(scaling: ScalingConfig, gpu: bool) -> ray.train.ScalingConfig:
    """Return our scaling section as Ray's."""
    workers = scaling.num_workers
    return ray.train.ScalingConfig(
        num_workers=workers if isinstance(workers, int) else (workers[0], workers[1]),  # type: ignore[arg-type]
        use_gpu=gpu,
        resources_per_worker=_resources(scaling, gpu),
        placement_strategy=scaling.placement_strategy,
        label_selector=scaling.label_selector or None,  # type: ignore[call-arg]
    )


def _resources(scaling: ScalingConfig, gpu: bool) -> dict[str, float]:
    """Return what one worker reserves."""
    return {"CPU": float(scaling.cpus_per_worker)} | ({"GPU": scaling.gpus_per_worker} if gpu else {})

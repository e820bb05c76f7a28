"""Have workers of the cluster do a job that is no training run, such as a profile (Ray)."""

import sys
import traceback
from typing import Any

import ray.train
from ray.train.torch import TorchTrainer

from trainers.causes import failure_of
from trainers.errors import PacelineError
from trainers.launch.log import setup_logging
from trainers.launch.spec import Job, R
from trainers.on_ray.cluster_end import ending_with_cluster
from trainers.on_ray.connect import check_cluster, ray_scaling
from trainers.on_ray.context import RayContext
from trainers.on_ray.function import fit
from trainers.on_ray.process_group import GroupConfig
from trainers.on_ray.vital_signs import VitalSigns
from trainers.redaction import redact


def _worker(loop_config: dict[str, Any]) -> Any:
    """Do it as one worker of the TorchTrainer."""
    job: Job[Any] = loop_config["job"]
    context = RayContext(None)
    setup_logging(context.rank, job.quiet)
    try:
        return job.execute(context).to_json()
    except Exception as error:
        failure = failure_of(error, context.rank)
        if not (isinstance(error, PacelineError) or failure.follows):
            print(redact(traceback.format_exc()), file=sys.stderr, end="")
        raise failure from None


def run_job(job: Job[R]) -> R:
    """Do it once, in a worker group of the job's scaling; joins the cluster. What Ray keeps of it beside the run's
    directory is deleted.

    Raises ConfigError where the cluster can never hold the group, RunFailedError where a worker failed.
    """
    gpu = check_cluster(job) == "cuda"
    with job.storage.beside() as place, ending_with_cluster("nothing was changed"), VitalSigns():
        trainer = TorchTrainer(
            _worker,
            train_loop_config={"job": job},
            torch_config=GroupConfig("nccl" if gpu else "gloo"),  # type: ignore[arg-type]
            scaling_config=ray_scaling(job.config.scaling, gpu),
            run_config=ray.train.RunConfig(name=place.name, storage_path=place.parent.uri),
        )
        answer: str = fit(trainer).return_value  # type: ignore[attr-defined]
    return job.read_result(answer.encode())

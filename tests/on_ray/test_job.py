"""A sweep as a Ray job, which brings its code along."""

import sys
from pathlib import Path

import pytest

from tests.specs import read_json

pytestmark = pytest.mark.ray


def jobs_of(cluster, directory):
    """The jobs whose metadata names a sweep, as `ray job list` has them."""
    from ray.job_submission import JobSubmissionClient

    found = JobSubmissionClient(cluster.dashboard).list_jobs()
    return [
        job
        for job in found
        if (job.metadata or {}).get("sweep") == str(directory)
    ]


@pytest.mark.full
def test_as_a_ray_job(cluster, tmp_path, command):
    # fmt: off
    done = command(
        "job", "submit", "--address", cluster.dashboard, "--working-dir . -- python -m tune examples/digits/sweep.yaml --storage_path", str(tmp_path),
        "--space.global_batch_size", "[64, 128]", "--space.precision [fp32] --train.epochs 4 --finalists 0 --objective.target", "{val_accuracy: 0.9}",
        program=(str(Path(sys.executable).parent / "ray"),),
    )
    # fmt: on
    assert done.code == 0, done.out + done.err
    assert "digits-sweep: 2 trials" in done.out
    assert "trial 2/2" in done.out
    assert read_json(tmp_path / "digits-sweep/summary.json")["best"]["id"]

    [job] = jobs_of(cluster, tmp_path / "digits-sweep")
    assert job.type == "SUBMISSION"
    assert job.metadata["trials"] == "2/2"
    assert job.metadata["best"].startswith("time_to_target ")

    packages = list(
        cluster.directory.glob(
            "session_*/runtime_resources/working_dir_files/_ray_pkg_*"
        )
    )
    directories = [path for path in packages if path.is_dir()]
    assert directories
    sizes = [
        sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        for path in directories
    ]
    assert max(sizes) < 5 * 2**20
    # best.yaml of a job names its task's directory relative to the job's
    # package, so that the next job finds it.
    assert "task_dir: ." in (tmp_path / "digits-sweep/best.yaml").read_text()

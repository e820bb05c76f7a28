"""What Ray starts for a lane on a cluster of the command's own, and what that
leaves of a user's environment.
"""

import json

import pytest

from tests.commands.test_first_script import stranger

pytestmark = pytest.mark.ray

SCRIPT = """
import json, os, pkgutil, sys
from pathlib import Path

# It is there where nodes may be taken away.
os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
import ray, ray.train, ray.tune
before = dict(os.environ)
import cluster, trainers, tune
for package in (cluster, trainers, tune):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__") and not module.name.endswith("_sink"):
            __import__(module.name)

def changed():
    names = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    return sorted(names - {"TORCHINDUCTOR_CACHE_DIR"})  # set by an import of torch's own

by_import = changed()
from tests.on_ray.embedded import main
found = main(Path(sys.argv[1]))
# Ray would write a token there, for which every `ray start` of this user would then ask.
after = changed() + [name for name in os.listdir(os.environ["HOME"]) if name == ".ray"]
ray.init(num_cpus=1, include_dashboard=False)
beside = ray.get(ray.remote(lambda: 1).remote())
print(json.dumps(found | {"by import": by_import, "after": after, "beside": beside}))
"""


@pytest.mark.full
def test_an_embedded_cluster_has_only_what_trains_and_changes_nothing(
    tmp_path,
):
    """Every actor is a Python that imports Ray."""
    out = stranger(tmp_path, "-c", SCRIPT, str(tmp_path))
    found = json.loads(out.strip().splitlines()[-1])
    assert (found["by import"], found["after"], found["beside"]) == ([], [], 1)
    assert found["mode"] == "token"
    assert list(found["statuses"].values()) == ["done"] * 3
    assert len(set(found["workers"])) == len(found["workers"]) == 3
    assert found["actors"] == {
        "Mailbox": 1,
        "ResourceTrainable": 1,  # Tune's actor of the trials
        "RayTrainWorker": 1,
    }
    # What `ray list actors --detail` and the dashboard show for them, and
    # which trial a worker had.
    assert [name for name in found["shown"] if name] == [
        "sweep, lane 0, worker",
        "sweep, mailbox",
        "sweep, trials",
    ]
    assert sorted(found["said"]) == [
        f"sweep, lane 0: trial {trial}" for trial in sorted(found["statuses"])
    ]
    assert set(found["ports"]) == {"127.0.0.1"}, found["ports"]
    assert {"raylet", "gcs_server", "ray::DashboardAgent"} <= set(
        found["ports"]["127.0.0.1"]
    )

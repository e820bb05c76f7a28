"""A new user's shell: the first script runs, and nothing of theirs is changed."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.conftest import FIRST, REPOSITORY
from tests.waits import HANG_S

pytestmark = pytest.mark.ray


def stranger(home, *command):
    """Run Python with nothing in its environment but PATH and a new HOME; returns what
    it printed.
    """
    # Of its own: Ray joins whatever cluster it finds in the one of the suite, where
    # other scripts run beside this.
    with tempfile.TemporaryDirectory(
        prefix="s", dir=os.environ["TMPDIR"], ignore_cleanup_errors=True
    ) as temporary:
        done = subprocess.run(
            [*FIRST, *command],
            cwd=REPOSITORY,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "PYTHONPATH": str(REPOSITORY),
                "TMPDIR": temporary,
            },
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


MARKS = {"ours-first": pytest.mark.full, "init-first": pytest.mark.campaign}


@pytest.mark.parametrize(
    "how", [*(pytest.param(how, marks=mark) for how, mark in MARKS.items()), "no-init"]
)
def test_the_drop_in_runs_whatever_comes_first(how, tmp_path):
    script = Path(__file__).with_name("first_script.py")
    assert "DOUBLES [2, 4] []" in stranger(tmp_path, str(script), how)


_BESIDE_RAY = """
import json, os, pkgutil, sys
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

print(json.dumps(changed()))
from trainers.on_ray.cluster import connect, disconnect
connect()
is_protected = os.environ["RAY_AUTH_MODE"] == "token"
disconnect()
# Ray would write a token there, for which every `ray start` of this user would then ask.
print(json.dumps(changed() + [name for name in os.listdir(os.environ["HOME"]) if name == ".ray"]))
ray.init(num_cpus=1, include_dashboard=False)
print(json.dumps([is_protected, ray.get(ray.remote(lambda: 1).remote())]))
"""


def test_neither_imports_nor_a_cluster_of_ours_change_the_environment(
    tmp_path,
):
    by_import, after_cluster, ray_beside = (
        stranger(tmp_path, "-c", _BESIDE_RAY).strip().split("\n")[-3:]
    )
    assert json.loads(by_import) == json.loads(after_cluster) == []
    assert json.loads(ray_beside) == [True, 1]

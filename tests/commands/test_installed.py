"""Paceline installed from its wheel, used from a repository that holds nothing of ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.test_documents import TUTORIAL, assert_runs
from tests.conftest import REPOSITORY


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Paceline's wheel, built and unpacked to a directory of its own."""
    directory = tmp_path_factory.mktemp("wheel")
    # fmt: off
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
                    "--target", str(directory / "site"), str(REPOSITORY)], check=True, cwd=directory, stdin=subprocess.DEVNULL)
    # fmt: on
    return directory / "site"


@pytest.mark.full
def test_wheel_has_what_it_needs(wheel):
    for name in (
        "trainers/py.typed",
        "tune/report/report.html",
        "cluster/files/schema.yaml",
        "cluster/aws.yaml",
    ):
        assert (wheel / name).is_file(), name
    assert not (wheel / "tests").exists()
    assert not (wheel / "examples").exists()


@pytest.mark.full
def test_from_a_repository_of_the_users_own(wheel, tmp_path, command):
    """The tutorial, from its empty folder to the winner's predictions."""
    installed = {
        "PYTHONPATH": str(wheel),
        "PATH": f"{wheel}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    where = "import importlib.util; print(importlib.util.find_spec('trainers').origin)"
    found = command("-c", where, cwd=tmp_path, env=installed)
    assert found.out.startswith(str(wheel)), "the wheel is what is tested"
    assert_runs(TUTORIAL, tmp_path, command, installed)

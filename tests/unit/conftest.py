"""What hypothesis draws; torch on one thread, whatever the machine has."""

import sys

import pytest
import torch

import tests.drawn  # noqa: F401

torch.set_num_threads(1)


@pytest.fixture
def user(tmp_path, monkeypatch):
    """A user's directory; the working directory is another one."""
    for name in ("user", "cwd"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in (
        "PACELINE_STORAGE",
        "RAY_JOB_CONFIG_JSON_ENV_VAR",
        "RAY_ADDRESS",
        "RANK",
        "WORLD_SIZE",
    ):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "user"

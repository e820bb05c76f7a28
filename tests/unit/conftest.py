"""What hypothesis draws: some dozens of inputs, always the same ones; thousands by `--hypothesis-profile faults`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

_BOTH: dict[str, Any] = {"database": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("suite", max_examples=60, derandomize=True, deadline=None, **_BOTH)
settings.register_profile("faults", max_examples=2500, deadline=5000, **_BOTH)
settings.load_profile("suite")


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's directory; the working directory is another one."""
    for name in ("user", "cwd"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("PACELINE_STORAGE", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_ADDRESS", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "user"

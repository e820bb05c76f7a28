"""The suite's own directory for temporary files."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import REPOSITORY, SCRATCH


def test_a_process_of_a_test_makes_none_of_its_own() -> None:
    """As a worker does that imports a test's module for the task in it."""
    code = "from tests.conftest import IS_OWN, SCRATCH; print(IS_OWN, SCRATCH)"
    told = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["False", str(SCRATCH)]

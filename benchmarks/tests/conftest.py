"""These tests leave nothing behind, as the suite's do not."""

from __future__ import annotations

from tests.conftest import nothing_left_behind, pytest_unconfigure

__all__ = ["nothing_left_behind", "pytest_unconfigure"]

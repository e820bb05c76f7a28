"""A thousand inputs, always the same ones, for the doors that read what somebody else wrote: tests/faults/fuzz.py."""

from __future__ import annotations

import pytest

from tests.faults.fuzz import READ_BACK, TARGETS, Target, fuzz
from tests.specs import REPOSITORY


@pytest.mark.parametrize("target", [*TARGETS, *READ_BACK], ids=lambda target: target.name)
def test_any_input_is_taken_or_refused_in_one_sentence(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    fuzz(target, target.share)

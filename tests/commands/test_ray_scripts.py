"""Scripts in the form of Ray's documentation, before and after the one import:
the same results.
"""

import json
from pathlib import Path

import pytest

from tests.commands.ray_scripts import SCRIPTS
from tests.commands.test_first_script import stranger

pytestmark = pytest.mark.ray

PLAIN = Path(__file__).with_name("ray_scripts.py").read_text()
IMPORTS = (
    "from ray.train.torch import TorchTrainer\nfrom ray.tune import Tuner\n"
)


def write(directory, changed):
    assert PLAIN.count(IMPORTS) == 1
    script = directory / "script.py"
    script.write_text(
        PLAIN.replace(IMPORTS, "from tune.ray import TorchTrainer, Tuner\n")
        if changed
        else PLAIN
    )
    return script


def trials(out):
    lines = [
        line.split(" ", 2)
        for line in out.splitlines()
        if line.startswith("TRIALS ")
    ]
    return {kind: json.loads(text) for _, kind, text in lines}


@pytest.mark.campaign
@pytest.mark.parametrize("kind", list(SCRIPTS))
def test_one_import_changes_no_result(kind, tmp_path):
    found = []
    for how in ("before", "after"):
        (directory := tmp_path / how).mkdir()
        script = write(directory, changed=how == "after")
        found.append(
            trials(
                stranger(
                    directory, str(script), str(directory / "storage"), kind
                )
            )[kind]
        )
    before, after = found
    for trial in [*before, *after] if kind == "pbt" else []:
        del trial[
            "rows"
        ]  # Ray loses those of trials that it lets pause: more of them, the sooner they go on
    assert before == after

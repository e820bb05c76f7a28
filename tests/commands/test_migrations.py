"""docs/migrate.md without Ray: its diffs apply, and what they make trains as
the script before it did.
"""

import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import migrations
from tests.conftest import free_port
from tests.specs import read_json
from tune.sweeps.spec import read_sweep


def val_loss(directory):
    """The last evaluation of the one run below a directory."""
    [result] = directory.glob("results/*/result.json")
    return float(read_json(result)["metrics"]["val_loss"])


def test_every_script_has_its_diff(tmp_path):
    found = [
        diff
        for section in migrations.sections()
        for diff in migrations.diffs(section)
    ]
    assert len(found) == migrations.PAGE.count("```diff") == 7
    assert sorted(name for name, _, _ in found) == sorted(
        path.name for path in migrations.SCRIPTS.iterdir()
    )
    for section in migrations.sections():
        migrations.after(section, tmp_path)


def test_a_diff_applies_as_it_is_or_not_at_all():
    assert (
        migrations.patched("one\n\ntwo\n", "@@\n one\n\n-two\n+2\n@@\n-one\n")
        == "\n2\n"
    )
    assert (
        migrations.patched(
            "one\ntwo\n 3\nfour\n", "@@\n-one\n-    ...\n-four\n+1\n"
        )
        == "1\n"
    )
    for hunk in ("-three\n", "-on\n", "-one\n", " two\n two\n"):
        with pytest.raises(
            AssertionError, match="not in the script, or more than once"
        ):
            migrations.patched("one\ntwo\none\n", f"@@\n{hunk}")


@pytest.mark.full
def test_plain_ddp(tmp_path, command):
    def run(module, *arguments):
        """Two ranks, as torchrun starts them; what the first says."""
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2")
        world = sizes | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }

        def rank(number):
            own = {
                "RANK": str(number),
                "LOCAL_RANK": str(number),
                "OMP_NUM_THREADS": "1",
            }
            return command(
                "-m",
                module,
                *arguments,
                cwd=tmp_path,
                env=world | own,
                forked=True,
            )

        with ThreadPoolExecutor() as pool:
            first, second = pool.map(rank, range(2))
        assert first.code == second.code == 0, first.err + second.err
        return first

    migrations.after("Plain DDP", tmp_path)
    script = run(migrations.before("Plain DDP", tmp_path).removesuffix(".py"))
    assert "2 workers (torchrun" in run("trainers", "train.yaml").out
    losses = re.findall(r"val_loss (\S+)", script.out)
    assert len(losses) == 5
    assert val_loss(tmp_path) == pytest.approx(float(losses[-1]), rel=1e-5)


def test_a_sweep_of_wandbs_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    for section in ("Plain DDP", "W&B sweeps"):
        migrations.after(section, tmp_path)
    spec = read_sweep(str(tmp_path / "sweep.yaml"), {})
    assert (spec.num_trials, spec.config.space["epochs"]) == (4, [2])


@pytest.mark.full
@pytest.mark.parametrize("section", ["Lightning", "transformers' Trainer"])
def test_a_trainer(section, tmp_path, command):
    migrations.after(section, tmp_path)
    modules = (
        [migrations.before(section, tmp_path).removesuffix(".py")],
        ["trainers", "train.yaml", "--launcher", "local"],
    )
    on_cpu = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    script, task = (
        command("-m", *module, cwd=tmp_path, env=on_cpu, forked=True)
        for module in modules
    )
    assert script.code == task.code == 0, script.err + task.err
    loss = re.findall(r"'(?:val|eval)_loss': ([\d.]+)", script.out)[-1]
    assert val_loss(tmp_path) == pytest.approx(float(loss), rel=1e-5)

"""Fine-tuning as people write it, each beside a plain loop: equal losses,
rates and ends; resumed to the bit.
"""

from pathlib import Path

import pytest
import safetensors.torch

import tests.unit.test_predict as predicted
from tests.unit.test_loop import check_resume
from trainers.inference import export

pytestmark = pytest.mark.full


class WithPeft(predicted.Kept):
    """PEFT's own wrapper: adapters with dropout on both layers."""

    def model(self):
        import peft

        adapters = peft.LoraConfig(
            r=2, lora_alpha=4, target_modules=["0", "4"], lora_dropout=0.1
        )
        return peft.get_peft_model(super().model(), adapters)


def test_a_model_of_peft(tmp_path, monkeypatch):
    """Adapters alone are kept, a resume is bit-equal, and the commands take
    the base from the task.
    """
    pytest.importorskip("peft")
    kept = {
        "global_batch_size": 64,
        "checkpoint": {"every_steps": 2, "parameters": "trained"},
    }
    check_resume(tmp_path, WithPeft, 6, **kept)
    monkeypatch.setattr(predicted, "WithPeft", WithPeft, raising=False)
    trained = {"checkpoint__parameters": "trained"}
    spec = predicted.train(tmp_path / "run", WithPeft, **trained)
    last = predicted.evaluations(spec)[-1]
    assert predicted.work(Path(spec.uri), kind=WithPeft).metrics == {
        name: one for name, one in last.items() if name[:4] == "val_"
    }
    predicted.work(
        Path(spec.uri), kind=WithPeft, out=str(tmp_path / "out.parquet")
    )
    export(spec.uri, str(tmp_path / "out.safetensors"))
    exported = safetensors.torch.load_file(tmp_path / "out.safetensors")
    learned = {
        name
        for name in exported
        if "running" not in name and "tracked" not in name
    }
    assert len(learned) == 4
    assert all("lora_" in name for name in learned)

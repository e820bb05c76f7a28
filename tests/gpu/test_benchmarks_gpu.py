"""The GPU benchmarks in miniature, on a GPU: every rung runs there, captured and
compiled ones too.
"""

import pytest

from benchmarks import ladder, resident
from benchmarks.runs import Budget
from tests.gpu.runs import CUDA

pytestmark = [pytest.mark.gpu, pytest.mark.real_gpu("speed")]


@pytest.mark.parametrize("name", ladder.SMALL)
def test_every_rung_but_the_compiled_is_done(name: str) -> None:
    only = ["fp32", "tf32", "bf16", "fp16", "channels_last", "fused", "bf16 again"]
    found = ladder.measure(
        {name: ladder.SMALL[name]}, only, CUDA, 0.1, Budget(None), n=1024
    )
    rows = {row["rung"]: row for row in found["works"][name]["rows"]}
    assert {
        rung: row["message"] for rung, row in rows.items() if row["status"] != "done"
    } == {}
    assert all(0 < row["figures"]["mfu_matmul"] < 1 for row in rows.values())


def test_the_small_models_compiled_and_captured_rungs_are_done() -> None:
    only = ["fused", "compile", "cuda_graph"]
    found = ladder.measure(
        {"cnn": ladder.SMALL["cnn"]}, only, CUDA, 0.2, Budget(None), n=1024
    )
    rows = {row["rung"]: row for row in found["works"]["cnn"]["rows"]}
    assert {
        rung: row["message"] for rung, row in rows.items() if row["status"] != "done"
    } == {}
    compiled = rows["compile"]["figures"]
    assert compiled["compile_s"] > 0
    assert (compiled["break_even_steps"] is None) == (
        compiled["ratio_to_rung_below"] <= 1
    )


def test_the_loop_and_the_captured_one_train_as_the_bare_one() -> None:
    found = resident.measure(
        resident.SMALL, CUDA, rounds=1, steps=60, budget=Budget(None)
    )
    assert found["rows"].keys() == {"bare", "paceline", "bare again", "captured"}

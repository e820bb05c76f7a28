"""Whether less or more of a metric is better: one rule for the best checkpoint, early
stopping and objectives.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from trainers.checkpoint.manifest import Best
from trainers.config import TrainConfig
from trainers.config.metrics import Mode, direction_of
from trainers.config.model import build
from trainers.config.sections import CheckpointConfig, EarlyStoppingConfig
from trainers.errors import ConfigError
from tune.objective import MEASURED, Objective

RUN = {
    "task": "task:House",
    "epochs": 1,
    "global_batch_size": 8,
    "optimizer": {"lr": 0.1},
}
KNOWN = [
    ("val_loss", "min"),
    ("val_error", "min"),
    ("mae", "min"),
    ("val_mae", "min"),
    ("val_mse", "min"),
    ("val_rmse", "min"),
    ("val_perplexity", "min"),
    ("val_brier_score", "min"),
    ("val_wer", "min"),
    ("step_time_s", "min"),
    ("usd_to_target", "min"),
    ("peak_memory_bytes", "min"),
    ("val_accuracy", "max"),
    ("val_acc", "max"),
    ("val_f1", "max"),
    ("val_auc", "max"),
    ("val_roc_auc", "max"),
    ("val_score", "max"),
    ("samples_per_s", "max"),
    ("neg_mean_absolute_error", "max"),
    ("val_neg_log_loss", "max"),
    ("val_perplexity", "min"),
    ("val_fid", "min"),
    ("val_fid_score", "min"),
    ("val_davies_bouldin_score", "min"),
    ("val_error_rate", "min"),
    ("val_top1_error", "min"),
    ("evalLoss", "min"),
    ("val_nrmse", "min"),
    ("val_neg_log_likelihood", "min"),
    ("val_bits_per_byte", "min"),
    ("val_false_positive_rate", "min"),
    ("val_r2", "max"),
    ("val_bleu", "max"),
    ("mean_iou", "max"),
    ("val_mIoU", "max"),
    ("val_map_50", "max"),
    ("val_rougeL", "max"),
    ("val_ndcg@10", "max"),
    ("val_f1_macro", "max"),
    ("val_accuracy_top5", "max"),
    ("val_accuracy_0", "max"),
    ("val_detection/map", "max"),
    ("val_dice_coefficient", "max"),
    ("val_tpr@fpr", "max"),
    ("val_fpr_at_95_tpr", "min"),
    ("val_reward_per_step", "max"),
    ("val_mean_per_class_iou", "max"),
    ("val_bits_per_byte", "min"),
    ("val_per", "min"),
    ("images_per_s", None),
    ("val_inaccuracy", None),
    ("val_negmse", None),
    ("answer", None),
    ("val_negative", None),
    ("val_topk", None),
    ("val_top5", None),
    ("val_anomaly_score", None),
    ("val_loss_gap", None),
    ("val_accuracy_drop", None),
    ("val_1-ssim", None),
    ("val_neg_accuracy", None),
    ("val_entropy", None),
    ("val_glass", None),
]


@pytest.mark.parametrize(("metric", "known"), KNOWN)
@pytest.mark.parametrize("mode", [None, "min", "max"])
def test_all_that_goes_by_a_metric_goes_in_one_direction(
    metric: str, known: Mode | None, mode: Mode | None
) -> None:
    """A mode that is given is what counts, also against the name."""
    assert direction_of(metric) == known
    expected = mode or known
    target = {"val_loss": 1.0}
    if expected is None:
        cases = [
            (CheckpointConfig, {"best": metric}, "best_mode"),
            (EarlyStoppingConfig, {"metric": metric, "patience": 1}, "mode"),
            (Objective, {"metric": metric, "target": target}, "mode"),
        ]
        for section, tree, key in cases:
            with pytest.raises(ConfigError) as raised:
                build(section, tree, "test")
            assert raised.value.field == key
            assert f"`{key}: min`" in raised.value.fix
        return
    kept = Best.of(CheckpointConfig(best=metric, best_mode=mode))
    improved = Best.to_go_on(EarlyStoppingConfig(metric=metric, mode=mode, patience=1))
    for goal in (kept, improved):
        assert goal.improves({metric: 0.0}, 1.0) is (expected == "min")
        assert goal.improves({metric: 2.0}, 1.0) is (expected == "max")
        assert not goal.improves({metric: math.nan}, None)
    if metric not in MEASURED or expected == known:
        assert Objective(metric=metric, mode=mode, target=target).direction == expected


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        ({"target": {"val_loss": 0.3}}, "min"),
        ({"target": {"val_topk": 0.3, "mode": "max"}}, "max"),
        ({"target": {"val_topk": 0.3}}, "target.mode"),
        ({"target": {"val_loss": 0.3}, "mode": "max"}, "mode"),
        ({"target": {"val_loss": 0.3, "mode": "max"}}, "max"),
        ({"metric": "val_topk", "mode": "max", "target": {"val_topk": 0.3}}, "max"),
        (
            {
                "metric": "val_topk",
                "mode": "max",
                "target": {"val_topk": 0.3, "mode": "min"},
            },
            "target",
        ),
        ({"metric": "val_loss", "mode": "max", "target": {"val_loss": 0.3}}, "max"),
        ({"metric": "val_topk", "mode": "max", "target": {"val_loss": 0.3}}, "min"),
        ({"metric": "val_loss", "target": {"mode": "max"}}, "target"),
        ({"metric": "samples_per_s", "mode": "min"}, "mode"),
    ],
)
def test_a_target_is_met_in_its_own_direction(
    objective: dict[str, Any], expected: str
) -> None:
    """A mode that contradicts, or is not known, is refused."""
    if expected not in ("min", "max"):
        with pytest.raises(ConfigError) as raised:
            build(Objective, objective, "test")
        assert raised.value.field == expected
        return
    judged = build(Objective, objective, "test")
    name = next(iter(objective["target"]))
    assert [judged.reached({name: value}) for value in (0.2, 0.4)] == [
        expected == "min",
        expected == "max",
    ]
    assert not judged.reached({"other": 0.3})


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("val_acuracy", "val_accuracy"),
        ("val_los", "val_loss"),
        ("accuraccy", "accuracy"),
        ("time_to_targt", "time_to_target"),
        ("samples_per_sec", "samples_per_s"),
        ("peak_memory_byte", "peak_memory_bytes"),
    ],
)
def test_a_misspelt_name_is_named(typed: str, meant: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build(CheckpointConfig, {"best": typed}, "test")
    assert raised.value.fix.startswith(f"did you mean `{meant}`?")


def test_one_metric_has_one_direction_in_a_run() -> None:
    best = {"checkpoint": {"best": "val_topk", "best_mode": "max"}}
    same, other = (
        {"early_stopping": {"metric": "val_topk", "mode": mode, "patience": 1}}
        for mode in ("max", "min")
    )
    build(TrainConfig, RUN | best | same, "test")
    with pytest.raises(ConfigError) as raised:
        build(TrainConfig, RUN | best | other, "test")
    assert raised.value.field == "early_stopping.mode"

"""Whether less or more of a metric is better: one rule for the best
checkpoint, early stopping and objectives.
"""

import math

import pytest

from tests.specs import error_of
from trainers.checkpoint.manifest import Best
from trainers.config.model import build
from trainers.config.sections import (
    CheckpointConfig,
    EarlyStoppingConfig,
    direction_of,
)
from trainers.config.yaml import parse_mapping
from tune.config import MEASURED, Objective

RUN = {
    "task": "task:House",
    "epochs": 1,
    "global_batch_size": 8,
    "optimizer": {"lr": 0.1},
}
KNOWN = {
    "min": """
        val_loss val_error mae val_mae val_rmse val_brier_score step_time_s
        usd_to_target peak_memory_bytes val_fid val_error_rate
        val_top1_error val_neg_log_likelihood val_false_positive_rate train_loss
        val_mean_absolute_error val_log_loss eval_loss val_loss2
    """,
    "max": """
        val_accuracy val_acc val_f1 val_roc_auc val_score samples_per_s
        neg_mean_absolute_error val_neg_log_loss val_r2 val_bleu mean_iou val_mIoU
        val_map_50 val_rougeL val_ndcg@10 val_recall_at_5 val_accuracy_top5
        val_acc1
    """,
    None: """
        images_per_s val_inaccuracy val_negmse answer val_negative val_topk val_top5
        val_anomaly_score val_loss_gap val_accuracy_drop val_1-ssim val_neg_accuracy
        val_entropy val_glass val_tpr@fpr val_reward_per_step
    """,
}


@pytest.mark.parametrize(
    ("metric", "known"),
    [
        (metric, known)
        for known, names in KNOWN.items()
        for metric in names.split()
    ],
)
@pytest.mark.parametrize("mode", [None, "min", "max"])
def test_all_that_goes_by_a_metric_goes_in_one_direction(metric, known, mode):
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
            with error_of(key, f"`{key}: min`"):
                build(section, tree, "test")
        return
    kept = Best.of(metric, mode)
    improved = Best.of(metric, mode, "early_stopping.metric")
    for goal in (kept, improved):
        assert goal.improves({metric: 0.0}, 1.0) is (expected == "min")
        assert goal.improves({metric: 2.0}, 1.0) is (expected == "max")
        assert not goal.improves({metric: 1.0}, 1.0)
        assert not goal.improves({metric: math.nan}, None)
    if metric not in MEASURED or expected == known:
        assert (
            Objective(metric=metric, mode=mode, target=target).direction
            == expected
        )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("target: {val_loss: 0.3}", "min"),
        ("target: {val_topk: 0.3, mode: max}", "max"),
        ("target: {val_topk: 0.3}", "target.mode"),
        ("{target: {val_loss: 0.3}, mode: max}", "mode"),
        ("target: {val_loss: 0.3, mode: max}", "max"),
        ("{metric: val_topk, mode: max, target: {val_topk: 0.3}}", "max"),
        ("{metric: val_loss, mode: max, target: {val_loss: 0.3}}", "max"),
        ("{metric: val_topk, mode: max, target: {val_loss: 0.3}}", "min"),
        ("{metric: val_loss, target: {mode: max}}", "target"),
        ("{metric: samples_per_s, mode: min}", "mode"),
    ],
)
def test_a_target_is_met_in_its_own_direction(text, expected):
    """A mode that contradicts, or is not known, is refused."""
    objective = parse_mapping(text, "test")
    if expected not in ("min", "max"):
        with error_of(expected):
            build(Objective, objective, "test")
        return
    judged = build(Objective, objective, "test")
    name = next(iter(objective["target"]))
    assert [judged.reached({name: value}) for value in (0.2, 0.3, 0.4)] == [
        expected == "min",
        True,
        expected == "max",
    ]
    assert not judged.reached({"other": 0.3})
    for value in (math.nan, math.inf, -math.inf):
        assert not judged.reached({name: value})

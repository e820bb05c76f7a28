"""Whether less or more of a metric is better: one rule for the best checkpoint, early stopping and objectives."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trainers.checkpoint.manifest import Best
from trainers.config.model import Settings, build
from trainers.config.sections import CheckpointConfig, EarlyStoppingConfig, Mode, direction_of
from trainers.errors import ConfigError
from tune.objective import Objective

KNOWN: list[tuple[str, Mode | None]] = [
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
    ("val_bleu", None),
    ("answer", None),
    ("val_negative", None),
]


@pytest.mark.parametrize(("metric", "known"), KNOWN)
@pytest.mark.parametrize("mode", [None, "min", "max"])
def test_all_that_goes_by_a_metric_goes_in_one_direction(metric: str, known: Mode | None, mode: Mode | None) -> None:
    """A mode that is given is what counts, also against the name."""
    assert direction_of(metric) == known
    expected = mode or known
    target = {"val_loss": 1.0}
    if expected is None:
        cases: list[tuple[type[Settings], dict[str, Any], str]] = [
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
        assert goal is not None
        assert goal.improves({metric: 0.0}, 1.0) is (expected == "min")
        assert goal.improves({metric: 2.0}, 1.0) is (expected == "max")
        assert not goal.improves({metric: math.nan}, None)
    assert Objective(metric=metric, mode=mode, target=target).direction == expected

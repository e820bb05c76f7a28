"""torchmetrics in evaluation: one figure, to the last bit, for any number of real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor

from tests.distributed.processes import run_processes
from tests.tasks import Blobs
from trainers.config.sections import DataConfig
from trainers.devices.group import Group
from trainers.model.precision import TABLE
from trainers.step.evaluation import evaluate
from trainers.task import task_feed

CPU = torch.device("cpu")


class Measured(Blobs):
    """Counts, whole data, floating sums, states that depend on the order of batches, names of some batches."""

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Any]:
        made = {
            "accuracy": torchmetrics.classification.MulticlassAccuracy(4),
            "auroc": torchmetrics.classification.MulticlassAUROC(4),
        }
        for metric in made.values():
            metric.update(outputs.softmax(1), batch[1])
        error = torchmetrics.MeanSquaredError()
        error.update(outputs[:, 0], batch[1])
        correlation = torchmetrics.PearsonCorrCoef()
        correlation.update(outputs[:, 0], batch[1].float())
        some = "high" if batch[0][0, 0] > 0 else "low"
        part = torchmetrics.MeanMetric()
        part.update(outputs)
        made |= {"error": error, "correlation": correlation, f"part_{some}": part}
        return {some: outputs[:, 0], **made, **super().metrics(outputs, batch)}


def all_evaluations(rank: int, world_size: int) -> list[dict[str, float]]:
    torch.set_num_threads(1)
    found = []
    for samples in (20, 97, 1797):  # the first: fewer batches than ranks
        task = Measured(samples=samples)
        torch.manual_seed(0)
        feed = task_feed(task.dataset("val"), task, DataConfig(), CPU, sharers=1, seed=0)
        found.append(evaluate(task.model(), task, feed, 32, TABLE["fp32"], Group(rank, world_size, CPU)))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_figure_for_any_number_of_workers(world_size: int, tmp_path: Path) -> None:
    alone = all_evaluations(0, 1)
    assert all(set(figures) >= {"val_auroc", "val_error", "val_correlation"} for figures in alone)
    assert 0 < alone[2]["val_auroc"] < 1
    assert run_processes(world_size, all_evaluations, tmp_path) == [alone] * world_size

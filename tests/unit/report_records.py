"""Hand-made records of a sweep over batch size and precision, for the tests of
its answer, report and figures.
"""

import math
from typing import Any

from trainers.errors import Status
from tune.config import SweepConfig
from tune.trials.record import TrialRecord, trial_id

SCRIPT = "<script>alert('owned')</script>"
TRAIN = {
    "task": "task:Digits",
    "batch_size_per_worker": 8,
    "epochs": 30,
    "optimizer": {"name": "adamw", "lr": 0.002},
}
ENVIRONMENT = {
    "paceline": "0.1.0",
    "torch": "2.15.0",
    "device": "1 x NVIDIA H200, 139 GiB",
    "host": SCRIPT,
}
SPACE = {
    "global_batch_size": [32, 64, 128, 256, 512],
    "precision": ["fp32", "bf16", "fp16"],
}
# batch size, precision, samples/s, MiB, val_accuracy, val_loss, s to the
# target (None: not reached)
DONE = [
    (32, "fp32", 4120.0, 310, 0.9791, 0.071, 4.31),
    (32, "bf16", 4890.0, 246, 0.9777, 0.074, 4.02),
    (64, "fp32", 7010.0, 402, 0.9805, 0.066, 4.4),
    (64, "bf16", 8240.0, 297, 0.9819, 0.062, 3.12),
    (128, "fp32", 10250.0, 588, 0.9763, 0.078, 4.61),
    (128, "bf16", 10890.0, 398, 0.9758, 0.079, 4.48),
    (256, "fp32", 12310.0, 961, 0.9708, 0.097, 5.23),
    (256, "bf16", 11980.0, 603, 0.9652, 0.118, None),
]


def config(metric: str = "time_to_target", **changes: Any) -> SweepConfig:
    objective = {
        "metric": metric,
        "target": {"val_accuracy": 0.97},
    } | changes.pop("objective", {})
    return SweepConfig.model_validate(
        {
            "name": "digits-sweep",
            "train": TRAIN,
            "space": SPACE,
            "objective": objective,
        }
        | changes
    )


def trial(
    number: int, status: Status, settings: dict[str, Any], **result: Any
) -> TrialRecord:
    start = 1_760_000_000.25 + 12 * number
    return TrialRecord(
        trial_id(settings),
        settings,
        status,
        start,
        start + 10.5,
        lane=number % 2,
        **result,
    )


def curve(
    accuracy: float, loss: float, duration_s: float, bend: float
) -> list[dict[str, float]]:
    return [
        {
            "step": 40.0 * epoch,
            "epoch": float(epoch),
            "train_time_s": duration_s * epoch / 30,
            "val_accuracy": accuracy - 0.85 * math.exp(-epoch / bend),
            "val_loss": loss + 2.2 * math.exp(-epoch / bend),
        }
        for epoch in range(1, 31)
    ]


def done() -> list[TrialRecord]:
    return [
        trial(
            number,
            "done",
            {"global_batch_size": batch, "precision": precision},
            samples_per_s=rate,
            step_time_s=batch / rate,
            peak_memory_bytes=mib * 2**20,
            time_to_target_s=time_s,
            metrics={
                "train_loss": loss / 2,
                "val_loss": loss,
                "val_accuracy": accuracy,
            },
            curve=curve(accuracy, loss, 43110 / rate, 2 + batch / 64),
        )
        for number, (
            batch,
            precision,
            rate,
            mib,
            accuracy,
            loss,
            time_s,
        ) in enumerate(DONE)
    ]


def failed() -> list[TrialRecord]:
    return [
        trial(
            8,
            "out_of_memory",
            {"global_batch_size": 512, "precision": "fp32"},
            message="microbatch 512 needs 1.2 GiB more than there is",
        ),
        trial(
            9,
            "error",
            {"global_batch_size": 512, "precision": "bf16"},
            message=f"ValueError: bad {SCRIPT}",
            traceback=f'Traceback (most recent call last):\n  File "task.py", line 7\n{SCRIPT}',
        ),
        trial(
            10,
            "diverged",
            {"global_batch_size": 64, "precision": "fp16"},
            samples_per_s=99999.0,
            step_time_s=0.001,
            peak_memory_bytes=300 * 2**20,
            time_to_target_s=0.1,
            metrics={
                "train_loss": math.nan,
                "val_loss": math.nan,
                "val_accuracy": 1.0,
            },
            curve=[
                *curve(0.95, 0.2, 5.0, 3)[:8],
                {"train_time_s": 1.5, "val_accuracy": math.nan},
            ],
            message="the loss is not finite since step 310",
        ),
    ]

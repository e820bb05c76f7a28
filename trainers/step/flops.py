"""Count the FLOPs of one sample, and look up the peak of the GPU.

Utilisation (MFU, Chowdhery et al. 2022) is the model's FLOPs per second
divided by the total peak of all workers, taken from data sheets (peaks.csv,
with the source of each row). A device without a row has no utilisation.
"""

import contextlib
import csv
import functools
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch.utils.flop_counter import FlopCounterMode

from trainers.model.activations import activations_kept
from trainers.step.forward import ForwardPass
from trainers.task import overrides

logger = logging.getLogger(__name__)

PEAKS = Path(__file__).with_name("peaks.csv")
"""Dense peaks from data sheets."""
# If all samples have one shape, a few are enough: at least two, for BatchNorm.
_LIKE_SAMPLES = 8


def count_flops(
    forward: ForwardPass,
    dataset: Dataset[Any],
    microbatch: Tensor,
    phases: Sequence[ForwardPass] = (),
) -> float | None:
    """Count the FLOPs per sample of a forward and backward pass, or return None.

    Matrix products, convolutions and attention are counted; an addition and a
    multiplication count as one each. What activation checkpointing recomputes
    is not counted. Returns None if the count fails or differs between steps.

    Call it in a `throwaway` block. It runs a pass over the training samples
    `microbatch` (int64 [n]): real samples, not the memory probe's worst case,
    because padding costs FLOPs too. `forward` must use the bare module,
    neither compiled nor wrapped, so that one rank can count without others.
    """
    task = forward.task
    modules = forward.model.modules()
    recurrent = any(isinstance(module, nn.RNNBase) for module in modules)
    if forward.device.type == "cuda" and recurrent:
        return None  # torch's counter does not know cuDNN's recurrent layers
    if not overrides(task, "worst_case_batch"):
        microbatch = microbatch[:_LIKE_SAMPLES]
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _AllModules()  # type: ignore[assignment]
    try:
        batch = forward.read(dataset, microbatch)
        with counter, activations_kept(forward.model):
            for part in phases or (forward,):
                with part.alone():
                    part.loss(batch).backward()
    except Exception as error:
        # Training meets an error of the task too, and reports it better; an
        # error of the counter must not end the run.
        logger.warning(
            "FLOPs cannot be counted (%s: %s): utilisation is left out",
            type(error).__name__,
            error,
        )
        return None
    if phases and overrides(task, "phases"):
        return None
    return counter.get_total_flops() / len(microbatch) or None


class _AllModules(contextlib.nullcontext[None]):
    """Replaces torch's module tracker, which fails on gradients of an input."""

    parents = frozenset({"Global"})


def utilisation(
    flops_per_sample: float | None,
    samples_per_s: float,
    world_size: int,
    peak: float | None,
) -> float | None:
    """Return model FLOPs utilisation over all workers, 0 to 1, or None if unknown.

    `peak` is the peak of one device, in FLOP/s.
    """
    if flops_per_sample is None or peak is None:
        return None
    return flops_per_sample * samples_per_s / (world_size * peak)


def device_peak(device: torch.device, precision: str) -> float | None:
    """Return this device's dense peak in `precision`, in FLOP/s; None when not known."""
    if device.type != "cuda":
        return None
    return gpu_peak(torch.cuda.get_device_name(device), precision)


def gpu_peak(gpu: str, precision: str) -> float | None:
    """Return a GPU's dense peak by its name in torch, or None if unknown.

    The name must match the pattern of a row of `peaks.csv` completely. A slice
    of a GPU (MIG) has no row.
    """
    if " MIG " in gpu:
        return None
    for row in _data_sheets():
        if re.fullmatch(row["gpu"], gpu):
            tflops = row.get(f"{precision.removesuffix('-pure')}_tflops")
            return float(tflops) * 1e12 if tflops else None
    return None


@functools.cache
def _data_sheets() -> list[dict[str, str]]:
    with PEAKS.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))

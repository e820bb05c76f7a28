"""`python -m trainers memory`: what a run will take of its devices' memory, by precision and checkpointing mode."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from trainers.config import TrainConfig
from trainers.context import RunContext
from trainers.devices.device import device_name, resolve_device, total_memory_bytes
from trainers.devices.group import Group
from trainers.errors import ConfigError
from trainers.launch.spec import RunSpec
from trainers.loop.data import load_data, make_sampler
from trainers.loop.memory_forecast import ERROR, Forecast, Forecaster, fake_world, largest_microbatch, usable_bytes
from trainers.model.precision import able_precisions

_ALIKE = (("fp32", "tf32"), ("bf16", "fp16", "fp8"), ("bf16-pure", "fp16-pure"))
"""Precisions whose tensors have the same sizes."""
_MODES = ("none", "selective", "full")


def memory_page(spec: RunSpec, gpu: str | None) -> Iterator[str]:
    """Yield the lines, each as soon as it is known: a row for each precision and mode that the model and device take.

    `gpu` has its memory in its name ("H100 80GB"); None: the device that is here. Raises ConfigError.
    """
    config = spec.config
    device = resolve_device(config.device)
    if device.type == "mps":
        device = torch.device("cpu")  # whose operators take as much
    card, capacity = (gpu, _named_bytes(gpu)) if gpu is not None else (device_name(device), _free_bytes(device))
    task, world = spec.load_task(), config.scaling.min_workers
    alone = Group(0, 1, device)
    train, _ = load_data(task, config, RunContext(None, "memory"), alone)
    make_sampler(train, task, config, alone)
    share = -(-config.batch_size // world)
    size = share if config.microbatch_size == "auto" else min(config.microbatch_size, share)
    workers = f"{world} worker{'s' * (world > 1)}"
    optimizer = f"{config.optimizer.name}{f', {config.optimizer.state} state' if config.optimizer.state else ''}"
    yield f"{spec.source}: {optimizer}, strategy {config.strategy}, {workers}; a microbatch of {size}"
    heads = ("parameters", "gradients", "optimizer", "activations", "peak")
    yield f"{'':36}{''.join(f'{head:>14}' for head in heads)}   largest microbatch on {card}"
    own: Forecast | None = None
    left_out: dict[str, list[str]] = {}
    with fake_world(world if config.strategy == "fsdp" else 1):
        for names in _ALIKE:
            able = [name for name in names if name in able_precisions(device)]
            for mode in _MODES if able else ():
                is_own = config.precision in names and mode == config.activation_checkpointing
                tried = config.model_copy(update={"precision": able[0], "activation_checkpointing": mode})
                try:
                    forecaster = Forecaster(spec.load_task, tried, train, Group(0, world, device))
                    found = forecaster(size)
                    largest = largest_microbatch(forecaster.peak, size, capacity)
                except ConfigError as error:
                    if is_own or mode == "none":
                        raise
                    modes = left_out.setdefault(error.rule, [])
                    modes += [mode] if mode not in modes else []
                    continue
                except (DataDependentOutputException, DynamicOutputShapeException) as error:
                    raise _unknown(config, error) from error
                own = found if is_own else own
                yield f"{'*' if is_own else ' '} {', '.join(names):22}{mode:12}{_figures(found)}   {_between(largest)}"
    if own is not None:
        yield from _blocks(own)
    for rule, modes in left_out.items():
        yield f"Without `activation_checkpointing: {' | '.join(modes)}`, which {rule}."
    yield (
        "Predicted, not measured: it goes by the sizes of tensors, without what kernels take inside, resident data and "
        f"fragments; largest microbatches within {ERROR:.0%}, on {card} of {capacity / 2**30:.1f} GiB for tensors."
    )


def _unknown(config: TrainConfig, error: Exception) -> ConfigError:
    rule = f"goes by the values of tensors ({error}), which a prediction does not have"
    return ConfigError("task", config.task, rule, "train some steps: what they take is in the result")


def _named_bytes(gpu: str) -> int:
    told = re.search(r"(\d+(?:\.\d+)?) ?Gi?B\b", gpu)
    if told is None:
        raise ConfigError("--gpu", gpu, "does not say how much memory it has", 'write it like "H100 80GB"')
    return usable_bytes(float(told[1]) * 2**30)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.97)
    return total_memory_bytes(device)


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _figures(found: Forecast) -> str:
    sizes = (found.parameters, found.gradients, found.optimizer, sum(found.activations.values()), found.peak)
    return "".join(f"{_mib(size):>14}" for size in sizes)


def _between(largest: int) -> str:
    if largest == 0:
        return "none: a single sample takes more"
    return f"{largest:,} ({int(largest * (1 - ERROR)):,} to {int(largest * (1 + ERROR)):,})"


def _blocks(own: Forecast) -> Iterator[str]:
    """Yield the activations of the configuration's own row: blocks that are numbered go together."""
    yield "* the configuration's own; its activations by block:"
    alike: dict[str, list[int]] = {}
    for name, size in own.activations.items():
        alike.setdefault(re.sub(r"^\d+$", "layer N", re.sub(r"\.\d+", ".N", name)), []).append(size)
    for name, sizes in alike.items():
        count = f"{len(sizes)} x " if len(sizes) > 1 else ""
        yield f"  {count + (name or 'loss and batch'):76}{_mib(sum(sizes)):>14}"

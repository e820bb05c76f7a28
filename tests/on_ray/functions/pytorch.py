"""Training functions for Ray Train in plain PyTorch."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray.train
import ray.train.collective
import ray.train.torch
import torch
import torch.distributed as dist
import torchmetrics
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FEATURES, CLASSES = 8, 3

DEFAULTS = {"epochs": 3, "batch_size": 32, "momentum": 0.9}


def rows(count: int = 256, seed: int = 0) -> TensorDataset:
    """Points, and for each the hidden direction that it is nearest to."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(count, FEATURES, generator=generator)
    directions = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(11))
    return TensorDataset(points, (points @ directions).argmax(dim=1))


def rows_in_order() -> dict[str, Any]:
    """The same as a dataset of Ray, of which each worker gets the same part every time."""
    import ray.data

    points, labels = rows().tensors
    pairs = zip(points.numpy(), labels.tolist(), strict=True)
    items = [{"points": point, "label": label} for point, label in pairs]
    options = ray.data.ExecutionOptions(preserve_order=True)
    return {
        "datasets": {"train": ray.data.from_items(items, override_num_blocks=4)},
        "dataset_config": ray.train.DataConfig(execution_options=options),
    }


def network(hidden: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


def start_epoch(loader: DataLoader[Any], epoch: int) -> None:
    """Let each epoch have an order of its own."""
    if ray.train.get_context().get_world_size() > 1:
        sampler: Any = loader.sampler
        sampler.set_epoch(epoch)


def train_epoch(model: nn.Module, loader: DataLoader[Any], optimizer: torch.optim.Optimizer) -> float:
    """One pass over the data; returns the mean loss of its batches."""
    losses = []
    for points, labels in loader:
        loss = nn.functional.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def prepared(config: dict[str, Any]) -> tuple[nn.Module, DataLoader[Any], torch.optim.Optimizer]:
    """A seeded model and its loader, both handed to Ray, and an optimizer."""
    torch.manual_seed(config.get("seed", 0))
    model = ray.train.torch.prepare_model(network())
    loader = ray.train.torch.prepare_data_loader(DataLoader(rows(), batch_size=config["batch_size"], shuffle=True))
    return model, loader, torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)


def unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def epochs(config: dict[str, Any]) -> None:
    """Ray Train, first steps: model and loader prepared, the sampler told of each epoch, a report after each."""
    model, loader, optimizer = prepared(config)
    for epoch in range(4):
        start_epoch(loader, epoch)
        ray.train.report({"epoch": epoch, "loss": train_epoch(model, loader, optimizer)})


def resumed(config: dict[str, Any]) -> None:
    """Ray Train, checkpoints: rank 0 saves model, optimizer and schedule, from where a second try goes on."""
    model, loader, optimizer = prepared(config)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    first = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory, "state.pt"), weights_only=True)
        unwrapped(model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first = state["epoch"] + 1
    for epoch in range(first, 4):
        start_epoch(loader, epoch)
        metrics = {"epoch": epoch, "loss": train_epoch(model, loader, optimizer), "lr": schedule.get_last_lr()[0]}
        if epoch == config["fails_at"] and checkpoint is None:
            raise RuntimeError("this epoch succeeds at the second try only")
        schedule.step()
        with tempfile.TemporaryDirectory() as directory:
            saved = None
            if ray.train.get_context().get_world_rank() == 0:
                state = {
                    "model": unwrapped(model).state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "schedule": schedule.state_dict(),
                    "epoch": epoch,
                }
                torch.save(state, Path(directory, "state.pt"))
                saved = ray.train.Checkpoint.from_directory(directory)
            ray.train.report(metrics, checkpoint=saved)


def checkpoint_of_each_rank(config: dict[str, Any]) -> None:
    """Ray Train, distributed checkpoints: each rank adds a file of its own to one checkpoint."""
    model, loader, optimizer = prepared(config)
    rank = ray.train.get_context().get_world_rank()
    for epoch in range(3):
        start_epoch(loader, epoch)
        loss = train_epoch(model, loader, optimizer)
        with tempfile.TemporaryDirectory() as directory:
            torch.save(unwrapped(model).state_dict(), Path(directory, f"model-rank={rank}.pt"))
            ray.train.report({"loss": loss}, checkpoint=ray.train.Checkpoint.from_directory(directory))


def asynchronous_upload(config: dict[str, Any]) -> None:
    """Ray Train, upload modes: checkpoints are uploaded in the background, under names that the user gives."""
    from ray.train import CheckpointUploadMode

    model, loader, optimizer = prepared(config)
    for epoch in range(3):
        start_epoch(loader, epoch)
        loss = train_epoch(model, loader, optimizer)
        saved = None
        if ray.train.get_context().get_world_rank() == 0:
            directory = tempfile.mkdtemp()
            torch.save(unwrapped(model).state_dict(), Path(directory, "model.pt"))
            saved = ray.train.Checkpoint.from_directory(directory)
        ray.train.report(
            {"loss": loss},
            checkpoint=saved,
            checkpoint_dir_name=f"epoch-{epoch}",
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        )


def context(config: dict[str, Any]) -> None:
    """Ray Train, the context: what a worker can ask about itself, its run and its storage."""
    torch.manual_seed(config["seed"])
    own = ray.train.get_context()
    storage = own.get_storage()
    ray.train.report(
        {
            "loss": torch.rand(()).item(),
            "world_size": own.get_world_size(),
            "world_rank": own.get_world_rank(),
            "local_rank": own.get_local_rank(),
            "local_world_size": own.get_local_world_size(),
            "node_rank": own.get_node_rank(),
            "experiment_name": own.get_experiment_name(),
            "experiment_directory": Path(storage.experiment_fs_path).name,
            "device": str(ray.train.torch.get_device()),
        }
    )


def collectives(config: dict[str, Any]) -> None:
    """Ray Train, collectives: rank 0 decides on a seed for all, which wait for each other before they start."""
    from ray.train.collective import barrier, broadcast_from_rank_zero

    rank = ray.train.get_context().get_world_rank()
    decision = broadcast_from_rank_zero({"seed": config["seed"] + 100} if rank == 0 else None)
    model, loader, optimizer = prepared({**config, **decision})
    barrier()
    for epoch in range(2):
        start_epoch(loader, epoch)
        ray.train.report({"loss": train_epoch(model, loader, optimizer), **decision})
        barrier()


def data_shard(config: dict[str, Any]) -> None:
    """Ray Train with Ray Data: each worker iterates over its shard of a dataset that the trainer was given."""
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    shard: Any = ray.train.get_dataset_shard("train")
    for epoch in range(2):
        total, seen = 0.0, 0
        for batch in shard.iter_torch_batches(batch_size=config["batch_size"]):
            loss = nn.functional.cross_entropy(model(batch["points"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, seen = total + loss.item() * len(batch["label"]), seen + len(batch["label"])
        ray.train.report({"epoch": epoch, "loss": total / seen, "rows": seen})


def checkpoints_so_far(config: dict[str, Any]) -> None:
    """Ray Train, reported checkpoints: at its end a run looks back at all that it has saved."""
    model, loader, optimizer = prepared(config)
    for epoch in range(3):
        start_epoch(loader, epoch)
        loss = train_epoch(model, loader, optimizer)
        with tempfile.TemporaryDirectory() as directory:
            torch.save(unwrapped(model).state_dict(), Path(directory, f"{ray.train.get_context().get_world_rank()}.pt"))
            ray.train.report({"loss": loss}, checkpoint=ray.train.Checkpoint.from_directory(directory))
    known = [one.metrics["loss"] for one in ray.train.get_all_reported_checkpoints()]
    ray.train.report({"loss": min(known, default=loss), "known": len(known)})


def preemption(config: dict[str, Any]) -> None:
    """Ray Train, preemption: before each step a worker asks whether its node is about to be taken away."""
    model, loader, optimizer = prepared(config)
    warned, losses = 0, []
    for points, labels in loader:
        warned += ray.train.get_preemption_info() is not None
        loss = nn.functional.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    ray.train.report({"loss": sum(losses) / len(losses), "warned": warned})


def reduced_by_hand(config: dict[str, Any]) -> None:
    """PyTorch inside Ray Train: the mean of a metric over all ranks, by torch.distributed's own all_reduce."""
    model, loader, optimizer = prepared(config)
    for epoch in range(3):
        start_epoch(loader, epoch)
        mean = torch.tensor(train_epoch(model, loader, optimizer), dtype=torch.float64)
        dist.all_reduce(mean)
        ray.train.report({"epoch": epoch, "loss": mean.item() / dist.get_world_size()})


def ddp_by_hand(config: dict[str, Any]) -> None:
    """PyTorch's DDP guide inside Ray Train: wrapper and sampler made by hand, on the group that Ray has set up."""
    torch.manual_seed(1)
    model = DistributedDataParallel(network())
    data = rows()
    sampler: DistributedSampler[Any] = DistributedSampler(data, dist.get_world_size(), dist.get_rank(), seed=3)
    loader = DataLoader(data, batch_size=config["batch_size"], sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    for epoch in range(3):
        sampler.set_epoch(epoch)
        ray.train.report({"epoch": epoch, "loss": train_epoch(model, loader, optimizer)})


def mixed_precision(config: dict[str, Any]) -> None:
    """PyTorch's AMP guide inside Ray Train: autocast in bf16, and a scaler that is there but switched off."""
    model, loader, optimizer = prepared(config)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for epoch in range(3):
        start_epoch(loader, epoch)
        last = 0.0
        for points, labels in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config["amp"]):
                loss = nn.functional.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            last = loss.item()
        ray.train.report({"epoch": epoch, "loss": last})


def accumulation(config: dict[str, Any]) -> None:
    """PyTorch's gradient accumulation inside Ray Train: ranks exchange gradients at every k-th batch only."""
    model, loader, optimizer = prepared(config)
    every = config["accumulate"]
    for epoch in range(3):
        start_epoch(loader, epoch)
        total = 0.0
        for number, (points, labels) in enumerate(loader, start=1):
            last = number % every == 0
            apart = isinstance(model, DistributedDataParallel) and not last
            with cast(DistributedDataParallel, model).no_sync() if apart else contextlib.nullcontext():
                loss = nn.functional.cross_entropy(model(points), labels) / every
                loss.backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item()
        ray.train.report({"epoch": epoch, "loss": total})


def no_argument() -> None:
    """Ray Train, first steps: a function that takes no configuration."""
    model, loader, optimizer = prepared({"batch_size": 64, "lr": 0.1})
    for epoch in range(2):
        start_epoch(loader, epoch)
        ray.train.report({"loss": train_epoch(model, loader, optimizer)})


def returned(config: dict[str, Any]) -> dict[str, Any]:
    """Ray Train, results: what the function returns is the result's `return_value`."""
    model, loader, optimizer = prepared(config)
    losses = []
    for epoch in range(3):
        start_epoch(loader, epoch)
        losses.append(train_epoch(model, loader, optimizer))
        ray.train.report({"loss": losses[-1]})
    return {"losses": losses, "weight": next(model.parameters()).flatten()[:3].tolist()}


def nested_model(config: dict[str, Any]) -> None:
    """Ray Train, notebooks: data and model are classes inside the function."""
    from torch.utils.data import Dataset

    class Waves(Dataset[tuple[torch.Tensor, torch.Tensor]]):
        def __len__(self) -> int:
            return 200

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            if index >= len(self):
                raise IndexError(index)
            phase = torch.arange(FEATURES) * (index / 50)
            return torch.sin(phase), torch.cos(phase[-1:])

    class Regressor(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.first = nn.Linear(FEATURES, width)
            self.norm = nn.BatchNorm1d(width)
            self.dropout = nn.Dropout(0.1)
            self.last = nn.Linear(width, 1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.dropout(torch.tanh(self.norm(self.first(inputs))))
            outputs: torch.Tensor = self.last(hidden)
            return outputs

    torch.manual_seed(4)
    model = ray.train.torch.prepare_model(Regressor(config["width"]))
    loader = ray.train.torch.prepare_data_loader(DataLoader(Waves(), batch_size=config["batch_size"], shuffle=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(2):
        start_epoch(loader, epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ray.train.report({"epoch": epoch, "loss": loss.item()})


def global_defaults(config: dict[str, Any]) -> None:
    """A script's own defaults, a dictionary at the top of its file, which the function adds to as it goes."""
    DEFAULTS.update(config)
    torch.manual_seed(5)
    model = ray.train.torch.prepare_model(network())
    loader = DataLoader(rows(), batch_size=int(DEFAULTS["batch_size"]), shuffle=True)
    loader = ray.train.torch.prepare_data_loader(loader)
    optimizer = torch.optim.SGD(model.parameters(), lr=DEFAULTS["lr"], momentum=DEFAULTS["momentum"])
    for epoch in range(int(DEFAULTS["epochs"])):
        start_epoch(loader, epoch)
        ray.train.report({"epoch": epoch, "loss": train_epoch(model, loader, optimizer), "lr": DEFAULTS["lr"]})


def with_torchmetrics(config: dict[str, Any]) -> None:
    """Ray Train, metrics: TorchMetrics gathers accuracy over all ranks; batches come from a process of the loader."""
    torch.manual_seed(6)
    model = ray.train.torch.prepare_model(network())
    loader = DataLoader(rows(), batch_size=config["batch_size"], shuffle=True, num_workers=1)
    loader = ray.train.torch.prepare_data_loader(loader)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)
    mean_loss = torchmetrics.MeanMetric()
    for epoch in range(2):
        start_epoch(loader, epoch)
        for points, labels in loader:
            scores = model(points)
            loss = nn.functional.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            accuracy.update(scores, labels)
            mean_loss.update(loss.detach())
        ray.train.report({"loss": mean_loss.compute().item(), "accuracy": accuracy.compute().item()})
        accuracy.reset()
        mean_loss.reset()


def fully_sharded(config: dict[str, Any]) -> None:
    """Ray Train with FSDP2: layers and model sharded over all ranks, which write one distributed checkpoint."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(7)
    mesh = init_device_mesh("cpu", (ray.train.get_context().get_world_size(),))
    model = nn.Sequential(network(hidden=32), nn.Linear(CLASSES, CLASSES))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loader = ray.train.torch.prepare_data_loader(DataLoader(rows(), batch_size=config["batch_size"], shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    for epoch in range(2):
        start_epoch(loader, epoch)
        loss = train_epoch(model, loader, optimizer)
        with tempfile.TemporaryDirectory() as directory:
            weights, moments = get_state_dict(model, optimizer)
            save({"model": weights, "optimizer": moments}, checkpoint_id=directory)
            ray.train.report({"loss": loss}, checkpoint=ray.train.Checkpoint.from_directory(directory))


def refuses(config: dict[str, Any]) -> None:
    """A function that some values of a hyperparameter make fail, one of them after its first report."""
    if config["hidden"] < 1:
        raise ValueError(f"hidden is {config['hidden']}, but must be positive")
    torch.manual_seed(8)
    model = ray.train.torch.prepare_model(network(config["hidden"]))
    loader = ray.train.torch.prepare_data_loader(DataLoader(rows(), batch_size=32, shuffle=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        start_epoch(loader, epoch)
        ray.train.report({"loss": train_epoch(model, loader, optimizer)})
        if config["hidden"] > 100:
            raise MemoryError("more than was granted")


def _with_options(config: dict[str, Any], *, betas: tuple[float, float], smoothing: float) -> None:
    """A function whose further arguments are bound before the trainer gets it (functools.partial)."""
    model, loader, _ = prepared({**config, "seed": 9})
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"], betas=betas)
    for epoch in range(2):
        start_epoch(loader, epoch)
        for points, labels in loader:
            loss = nn.functional.cross_entropy(model(points), labels, label_smoothing=smoothing)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ray.train.report({"loss": loss.item()})


bound = functools.partial(_with_options, betas=(0.8, 0.95), smoothing=0.1)


@dataclass
class Settings:
    """What a `Loop` is made with."""

    hidden: int = 24
    epochs: int = 3
    weight_decay: float = 0.01


class Loop:
    """A training loop as an object that is called, its settings a dataclass."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.history: list[float] = []

    def __call__(self, config: dict[str, Any]) -> list[float]:
        torch.manual_seed(10)
        own = self.settings
        model = ray.train.torch.prepare_model(network(own.hidden))
        loader = ray.train.torch.prepare_data_loader(DataLoader(rows(), batch_size=config["batch_size"], shuffle=True))
        optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=own.weight_decay)
        for epoch in range(own.epochs):
            start_epoch(loader, epoch)
            self.history.append(train_epoch(model, loader, optimizer))
            ray.train.report({"loss": self.history[-1], "epochs": len(self.history)})
        return self.history

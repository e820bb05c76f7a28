"""Batches of several inputs and tasks, some of them ragged, as people collate them: equal to a plain loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import Dataset, default_collate

from tests.unit.test_evaluation import run
from tests.unit.test_recipes import curve, plain
from trainers.task import Task


class Scenes(Dataset[Any]):
    """A picture [3, 4, 4], 0 to 4 boxes [n, 4], a class and a name."""

    def __init__(self, split: str) -> None:
        generator = torch.Generator().manual_seed(len(split))
        self.pictures = torch.rand(33, 3, 4, 4, generator=generator, dtype=torch.float64)
        counts = torch.randint(0, 5, (33,), generator=generator).tolist()
        self.boxes = [torch.rand(n, 4, generator=generator, dtype=torch.float64) for n in counts]

    def __len__(self) -> int:
        return 33

    def __getitem__(self, index: int) -> dict[str, Any]:
        names = {"picture": self.pictures[index], "boxes": self.boxes[index], "label": index % 3}
        return names | {"name": f"scene {index}"}


@dataclasses.dataclass(frozen=True)
class Scene:
    """A batch of them; how many boxes each has is not for the constructor."""

    channels: ClassVar[int] = 3
    pictures: Tensor
    boxes: list[Tensor]
    labels: Tensor
    names: list[str]
    counts: list[int] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", [len(one) for one in self.boxes])


def as_dataclass(samples: list[Any]) -> Scene:
    labels = torch.tensor([one["label"] for one in samples])
    pictures, boxes = torch.stack([one["picture"] for one in samples]), [one["boxes"] for one in samples]
    return Scene(pictures, boxes, labels, [one["name"] for one in samples])


def as_nested(samples: list[Any]) -> dict[str, Any]:
    """Ragged parts first, so that the first tensor counts boxes."""
    inputs = {"boxes": [one["boxes"] for one in samples], "picture": torch.stack([one["picture"] for one in samples])}
    return {"inputs": inputs, "targets": {"label": default_collate([one["label"] for one in samples])}, "note": None}


def as_pairs(samples: list[Any]) -> tuple[Any, ...]:
    """As torchvision's reference for detection has it; the first tensor is a picture, and counts its channels."""
    return tuple(
        zip(*((one["picture"], {"boxes": one["boxes"], "label": one["label"]}) for one in samples), strict=True)
    )


def parts_of(batch: Any) -> tuple[Tensor, list[Tensor], Tensor]:
    """Pictures, boxes and labels of a batch of any of these kinds."""
    if isinstance(batch, Scene):
        assert batch.counts == [len(one) for one in batch.boxes]
        assert len(batch.names) == len(batch.labels)
        return batch.pictures, batch.boxes, batch.labels
    if isinstance(batch, dict):
        return batch["inputs"]["picture"], batch["inputs"]["boxes"], batch["targets"]["label"]
    pictures, targets = batch
    return torch.stack(pictures), [one["boxes"] for one in targets], torch.tensor([one["label"] for one in targets])


class TwoHeads(nn.Module):
    """The class of a scene, and the middle of its boxes, of what it makes of the picture and their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.label, self.middle = nn.Linear(52, 16), nn.Linear(16, 3), nn.Linear(16, 4)
        self.double()

    def forward(self, pictures: Tensor, boxes: list[Tensor]) -> tuple[Tensor, Tensor]:
        summed = torch.stack([one.sum(0) for one in boxes])
        features = self.body(torch.cat([pictures.flatten(1), summed], 1)).tanh()
        return self.label(features), self.middle(features)


class Seen(Task):
    """Two losses, each a mean over samples; `weight` is the default."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def model(self) -> nn.Module:
        return TwoHeads()

    def dataset(self, split: str) -> Scenes:
        return Scenes(split)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(*parts_of(batch)[:2])

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        _, boxes, labels = parts_of(batch)
        middles = torch.stack([one.sum(0) / max(1, len(one)) for one in boxes])
        return F.cross_entropy(outputs[0], labels) + 0.5 * F.mse_loss(outputs[1], middles)


@pytest.mark.parametrize("collate", [as_dataclass, as_nested, as_pairs])
@pytest.mark.parametrize(("microbatch", "num_workers"), [(4, 0), (4, 1)])
def test_several_tasks_and_ragged_inputs(collate: Any, microbatch: int, num_workers: int, tmp_path: Path) -> None:
    task, data = Seen(collate), Scenes("train")

    def loss_of(model: nn.Module, at: list[int]) -> Tensor:
        batch = collate([data[index] for index in at])
        return task.loss(task.forward(model, batch), batch)

    wanted = plain(task, lambda model: SGD(model.parameters(), 0.2), loss_of)
    loaded = {"num_workers": num_workers, "pin_memory": False}
    assert curve(task, tmp_path, microbatch, data=loaded) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("collate", [as_dataclass, as_nested, as_pairs])
def test_their_evaluation_is_a_mean_over_samples(collate: Any) -> None:
    size = 4
    task, data, model = Seen(collate), Scenes("val"), TwoHeads()
    batch = collate([data[index] for index in range(33)])
    wanted = task.loss(task.forward(model, batch), batch).item()
    assert run(task, data, size, model)["val_loss"] == pytest.approx(wanted, rel=1e-12)

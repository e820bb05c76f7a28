"""Task: its defaults, and batches of any nesting."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.data.batch import fetch, map_tensors, num_samples, tensors_of
from trainers.launch.local import LocalContext
from trainers.loop.fit import fit
from trainers.storage import Storage
from trainers.task import Task, overrides


class Pair(NamedTuple):
    inputs: Tensor
    name: str


@dataclass
class Graph:
    nodes: Tensor
    edges: list[Tensor]


class Encoding(UserDict[str, Any]):
    """As transformers' BatchEncoding is: a constructor of its own, attributes
    beside the items and instead of them.
    """

    def __init__(self, data, encodings, *, tensor_type):
        assert tensor_type == "pt"
        super().__init__(data)
        self._encodings = encodings

    def __getitem__(self, item):
        return (
            self.data[item] if isinstance(item, str) else self._encodings[item]
        )

    def __getattr__(self, item):
        try:
            return self.data[item]
        except KeyError:
            raise AttributeError(item) from None

    def __getstate__(self):
        return {"data": self.data, "encodings": self._encodings}

    def __setstate__(self, state):
        self.data = state["data"]
        self._encodings = state["encodings"]


NESTED = {
    "a": [torch.zeros(3, 2), (torch.ones(3), "x")],
    "b": Pair(torch.full((3,), 2.0), "n"),
    "c": None,
}


def test_tensors_come_in_order():
    assert [float(tensor.flatten()[0]) for tensor in tensors_of(NESTED)] == [
        0.0,
        1.0,
        2.0,
    ]
    assert (
        len(tensors_of(Graph(torch.zeros(1), [torch.ones(2), torch.ones(3)])))
        == 3
    )
    assert tensors_of("no tensor") == []


def test_mapping_keeps_types_and_other_leaves():
    mapped = map_tensors(lambda tensor: tensor + 1, NESTED)
    assert type(mapped["b"]) is Pair
    assert mapped["b"].name == "n"
    assert mapped["a"][1][1] == "x"
    assert isinstance(mapped["a"], list)
    assert isinstance(mapped["a"][1], tuple)
    assert mapped["c"] is None
    assert [float(tensor.flatten()[0]) for tensor in tensors_of(mapped)] == [
        1.0,
        2.0,
        3.0,
    ]
    graph = map_tensors(
        lambda tensor: tensor * 2, Graph(torch.ones(1), [torch.ones(2)])
    )
    assert isinstance(graph, Graph)
    assert graph.edges[0].tolist() == [2.0, 2.0]


def test_an_encoding_keeps_its_type_and_what_it_holds_beside_its_items():
    batch = Encoding(
        {
            "ids": torch.tensor([[1, 2]]),
            "nested": UserDict(mask=torch.tensor([[1, 0]])),
        },
        ["e"],
        tensor_type="pt",
    )
    mapped = map_tensors(lambda tensor: tensor + 1, batch)
    assert type(mapped) is Encoding
    assert (
        mapped.ids.tolist(),
        mapped["nested"]["mask"].tolist(),
        mapped[0],
    ) == (
        [[2, 3]],
        [[2, 1]],
        "e",
    )
    assert batch.ids.tolist() == [[1, 2]], (
        "the batch that was given stays as it is"
    )
    assert type(mapped["nested"]) is UserDict


def test_samples_are_counted_by_the_first_tensor_with_a_dimension():
    assert num_samples(NESTED) == 3
    assert num_samples((torch.tensor(5.0), torch.zeros(7, 1))) == 7
    with pytest.raises(ValueError):
        num_samples({"a": torch.tensor(1.0), "b": "x"})


def test_the_defaults():
    task = Task()
    layer = nn.Linear(2, 3)
    assert task.forward(layer, (torch.ones(4, 2), None)).shape == (4, 3)
    assert task.forward(layer, {"input": torch.ones(5, 2)}).shape == (5, 3)
    encoding = Encoding({"input": torch.ones(6, 2)}, [], tensor_type="pt")
    assert task.forward(layer, encoding).shape == (6, 3)
    assert set(task.predictions(UserDict(logits=torch.ones(4)), encoding)) == {
        "logits"
    }
    assert float(task.weight((torch.ones(4, 2),))) == 4.0
    assert task.metrics(None, None) == {}
    assert task.transform("batch", True) == "batch"
    assert task.state_dict() == {}
    assert task.collate([(torch.ones(2), 1), (torch.ones(2), 0)])[
        1
    ].tolist() == [1, 0]
    task.load_state_dict({})
    task.setup()


def test_the_worst_case_is_of_the_size_asked_for():
    data = TensorDataset(torch.arange(5))
    (rows,) = Task().worst_case_batch(data, 12)
    assert rows.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_only_a_plain_tensor_dataset_is_indexed_whole():
    class Augmented(TensorDataset):
        def __getitem__(self, index):
            return tuple(-tensor[index] for tensor in self.tensors)

    (plain,) = fetch(TensorDataset(torch.arange(5)), [1, 2], default_collate)
    (changed,) = fetch(Augmented(torch.arange(5)), [1, 2], default_collate)
    collated = fetch(TensorDataset(torch.arange(5)), [1, 2], len)
    assert (plain.tolist(), changed.tolist()) == ([1, 2], [-1, -2])
    assert collated == 2


class Downloaded(Task):
    """Has its data in a file that `setup` writes."""

    def __init__(self, file):
        self.file = file

    def setup(self):
        assert not self.file.exists(), "it is called once"
        torch.save(torch.ones(8, 2), self.file)

    def model(self):
        return nn.Linear(2, 1)

    def dataset(self, split):
        return (
            TensorDataset(torch.load(self.file)) if split == "train" else None
        )

    def loss(self, outputs, batch):
        return outputs.square().mean()


def fitted(task, tmp_path):
    given = {
        "task": "task:Downloaded",
        "epochs": 1,
        "global_batch_size": 4,
        "device": "cpu",
        "optimizer": {"name": "sgd", "lr": 0.1},
    }
    return fit(
        task,
        build(TrainConfig, given, "test"),
        LocalContext(Storage(tmp_path / "run"), "local"),
    )


def test_setup_comes_before_the_data(tmp_path):
    assert fitted(Downloaded(tmp_path / "data.pt"), tmp_path).steps == 2


def test_an_attribute_takes_a_methods_place(tmp_path):
    called = []
    task = Downloaded(tmp_path / "data.pt")
    task.model = lambda: nn.Linear(1, 1)
    task.transform = lambda batch, training: [batch[0][:, :1]]
    task.schedule = lambda optimizer, config: called.append("schedule")
    task.after_step = lambda model, step: called.append(step)
    fitted(task, tmp_path)
    assert called == ["schedule", 1, 2]
    for name in {name for name in vars(Task) if name[0] != "_"}:
        assert not overrides(Task(), name)

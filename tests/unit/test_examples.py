"""The examples' own parts: real data as its publishers lay it out (made small
here), conversion, augmentation.
"""

import struct
import sys

import numpy as np
import pytest
import torch

from tests.conftest import REPOSITORY
from tests.specs import read_spec
from trainers.errors import ConfigError
from trainers.launch.local import LocalContext


def write_idx(path, values):
    """MNIST's own format: a magic number with the type (8: unsigned bytes) and
    the rank, sizes, values.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    head = struct.pack(
        f">I{values.ndim}I", 0x0800 + values.ndim, *values.shape
    )
    path.write_bytes(head + values.astype(np.uint8).tobytes())


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_mnist_as_torchvision_keeps_it(name, tmp_path, monkeypatch):
    from examples.fashion_mnist.task import FashionMnist
    from examples.mnist.task import Mnist

    kind = {"mnist": Mnist, "fashion_mnist": FashionMnist}[name]
    rng = np.random.default_rng(0)
    images = {
        "train": rng.integers(0, 256, (20, 28, 28)),
        "t10k": rng.integers(0, 256, (10, 28, 28)),
    }
    labels = {
        part: rng.integers(0, 10, len(found)) for part, found in images.items()
    }
    for part, found in images.items():
        write_idx(
            tmp_path / kind.source / "raw" / f"{part}-images-idx3-ubyte", found
        )
        write_idx(
            tmp_path / kind.source / "raw" / f"{part}-labels-idx1-ubyte",
            labels[part],
        )
    task = kind(root=str(tmp_path))
    task.setup()
    assert not list(tmp_path.glob("*.tmp"))
    monkeypatch.setitem(
        sys.modules, "torchvision", None
    )  # whoever imports it now fails
    again = kind(root=str(tmp_path))
    again.setup()
    for split, part in (("train", "train"), ("val", "t10k")):
        pixels, classes = again.dataset(split).tensors
        assert pixels.dtype == torch.uint8
        assert np.array_equal(pixels.numpy(), images[part][:, None])
        assert classes.tolist() == labels[part].tolist()


def test_without_data_and_network_a_sentence_says_what_to_do(
    tmp_path, monkeypatch
):
    from torchvision.datasets import mnist

    from examples.mnist.task import Mnist

    def no_network(url, **_):
        raise mnist.URLError("no route to host")

    monkeypatch.setattr(mnist, "download_and_extract_archive", no_network)
    with pytest.raises(ConfigError) as caught:
        Mnist(root=str(tmp_path)).setup()
    assert "synthetic: true" in caught.value.fix
    assert not list(tmp_path.glob("*.safetensors*"))


@pytest.fixture(scope="module")
def class_folders(tmp_path_factory):
    """Class folders of JPEGs of many sizes, one of them grey and one a PNG."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("imagenet")
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 3)):
        for label, name in enumerate(("n01", "n02")):
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                wide = 40 + 7 * index
                high = 90 - 4 * index
                pixels = rng.integers(0, 80, (high, wide, 3)) + 100 * label
                image = Image.fromarray(pixels.astype(np.uint8))
                if index == 1:
                    image = image.convert("L")
                image.save(
                    folder
                    / split
                    / name
                    / (f"{index}.png" if index == 2 else f"{index}.JPEG")
                )
    return folder


def test_imagenet_is_the_same_from_folders_and_mapped_pixels(
    class_folders, tmp_path
):
    from examples.imagenet.convert import convert
    from examples.imagenet.task import ImageNet
    from trainers.data.batch import fetch

    convert(class_folders, tmp_path, stored=32, workers=1)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")}
    assert len(kept) == 4
    convert(class_folders, tmp_path, stored=32, workers=1)
    assert kept == {path: path.stat().st_mtime_ns for path in kept}
    found = []
    for place in (class_folders, tmp_path):
        task = ImageNet(data=str(place), stored=32, size=28, classes=2)
        found.append(fetch(task.dataset("train"), range(24), task.collate))
        assert len(task.dataset("val")) == 6
    images, labels = found[0]
    assert images.shape == (24, 3, 32, 32)
    assert images.dtype == torch.uint8
    assert labels.tolist() == [0] * 12 + [1] * 12
    assert images[12:].float().mean() - images[:12].float().mean() > 80
    assert torch.equal(found[1][0], images)
    assert found[1][1].tolist() == labels.tolist()


def test_bert_fine_tunes_what_is_on_disk(tmp_path):
    """The real path: a tokenizer, pretrained weights and texts in Parquet, all
    made here.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        BertTokenizerFast,
    )

    from examples.bert.task import GEOMETRIES, Bert

    words = [
        "good",
        "fine",
        "great",
        "bad",
        "poor",
        "dull",
        "film",
        "a",
        "the",
        "was",
    ]
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])
    )
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(
        tmp_path / "model"
    )
    config = BertConfig(
        vocab_size=15, max_position_embeddings=32, **GEOMETRIES["tiny"]
    )
    torch.manual_seed(0)
    given = BertForSequenceClassification(config)
    given.save_pretrained(tmp_path / "model")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 200)
    texts = [
        f"the film was {words[3 * (1 - label) + rng.integers(3)]}"
        for label in labels
    ]
    for split, rows in (("train", slice(160)), ("val", slice(160, None))):
        pq.write_table(
            pa.table({"sentence": texts[rows], "label": labels[rows]}),
            tmp_path / f"{split}.parquet",
        )
    arguments = {
        "train": str(tmp_path / "train.parquet"),
        "val": str(tmp_path / "val.parquet"),
        "text": "sentence",
        "length": 12,
        "pretrained": str(tmp_path / "model"),
    }
    built = Bert(**arguments).model()
    name = "bert.encoder.layer.1.output.dense.weight"
    assert torch.equal(built.state_dict()[name], given.state_dict()[name])
    changes = {
        "task_args": arguments,
        "storage_path": str(tmp_path / "runs"),
        "epochs": 4,
        "optimizer.lr": 0.003,
        "launcher": "local",
        "device": "cpu",
        "precision": "fp32",
    }
    spec = read_spec(str(REPOSITORY / "examples/bert/train.yaml"), changes)
    result = spec.execute(LocalContext(spec.storage, "local"))
    assert result.metrics["val_accuracy"] == 1.0
    assert "val_synthetic" not in result.metrics


def test_packed_lines_are_all_text_in_their_order(tmp_path):
    from examples.gpt.task import CharacterModel

    file = tmp_path / "text"
    file.write_text(
        "\n".join(f"line {number} of some length" for number in range(100))
    )
    task = CharacterModel(
        text=str(file), context=64, width=16, heads=2, layers=1, packed=True
    )
    [rows] = task.dataset("train").tensors
    lines = file.read_text().splitlines()[:90]
    read = bytes(rows[0].tolist()) + b"".join(
        bytes(row[1:].tolist()) for row in rows[1:]
    )
    assert "\n".join(["", *lines, ""]).encode().startswith(read)
    assert len(read) > 64 * (len("\n".join(lines)) // 64 - 1)
    short = (
        CharacterModel(text=str(file), context=1_000_000, packed=True)
        .dataset("val")
        .tensors[0]
    )
    assert short.shape == (1, 1_000_001)
    batch = task.transform((rows[:4],), True)
    assert task.weight(batch) == 4 * 64
    assert task.loss(task.forward(task.model(), batch), batch).isfinite()

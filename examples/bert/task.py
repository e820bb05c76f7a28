"""BERT fine-tuned to classify texts (`pip install 'paceline[bert]'`)."""

from __future__ import annotations

from glob import glob
from typing import Any

import pyarrow.dataset
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from examples.synthetic import MaySynthesize
from trainers.errors import MISSING, ConfigError

GEOMETRIES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
    },
    "base": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}
"""Sizes of BERT by name (Devlin et al. 2018); tiny is for tests."""
_PRETRAINED = {
    "base": "google-bert/bert-base-uncased",
    "large": "google-bert/bert-large-uncased",
}
_CLASSES = 2
_VOCABULARY = 30_522
_PADDING = 0
_FIRST_WORD = 1000  # BERT's tokens below this one are special or unused


class Bert(MaySynthesize):
    """Classify B texts [B, length] (token ids, padded with 0).

    With `synthetic: true` nothing is downloaded: the model has random weights,
    and each split has `samples` texts of random words.

    Args:
        train: Parquet files for training (a path or a glob), with a column of
            texts and a column `label` of 0 or 1.
        val: Parquet files for validation, with the same columns.
        text: The name of the column of texts.
        length: The number of tokens to which each text is padded or cut.
        geometry: The size of the model: base, large or tiny.
        pretrained: The model's name on the Hugging Face hub, or its directory.
            None: Google's weights for `geometry`.
    """

    def __init__(
        self,
        train: str | None = None,
        val: str | None = None,
        text: str = "text",
        length: int = 128,
        geometry: str = "base",
        pretrained: str | None = None,
        synthetic: bool = False,
        samples: int = 4096,
    ) -> None:
        super().__init__(synthetic)
        if geometry not in GEOMETRIES:
            raise ConfigError(
                "task_args.geometry",
                geometry,
                "is unknown",
                f"choose one of {', '.join(GEOMETRIES)}",
            )
        self.files = {"train": train, "val": val}
        self.text = text
        self.length = length
        self.geometry = geometry
        self.samples = samples
        self.pretrained = pretrained or _PRETRAINED.get(geometry)
        if not synthetic:
            for split, file in self.files.items():
                if file is None:
                    raise ConfigError(
                        f"task_args.{split}",
                        MISSING,
                        "is needed",
                        "name Parquet files, or set `synthetic: true`",
                    )
            if self.pretrained is None:
                raise ConfigError(
                    "task_args.pretrained",
                    MISSING,
                    f"is needed for geometry {geometry}",
                    "name a model",
                )

    def setup(self) -> None:
        """Download model and tokenizer to transformers' cache, unless they are there."""
        super().setup()
        if self.synthetic:
            return
        try:
            self.model()
            self._tokens(["a text"])
        except OSError as error:
            raise ConfigError(
                "task_args.pretrained",
                self.pretrained,
                f"cannot be loaded ({str(error).splitlines()[0]})",
                "name a directory with the model, or set `task_args: {synthetic: true}`",
            ) from error

    def dataset(self, split: str) -> Dataset[Any]:
        """Return a dataset of token ids [length] and labels."""
        if self.synthetic:
            return TensorDataset(*self._synthetic_texts(1 + (split == "val")))
        files = sorted(glob(self.files[split] or ""))  # noqa: PTH207 (may be absolute)
        table = pyarrow.dataset.dataset(files).to_table([self.text, "label"])
        labels = torch.tensor(table["label"].to_pylist())
        return TensorDataset(
            self._tokens(table[self.text].to_pylist()), labels
        )

    def _tokens(self, texts: list[str]) -> Tensor:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.pretrained)
        found = tokenizer(
            texts,
            padding="max_length",
            truncation=True,
            max_length=self.length,
            return_tensors="pt",
        )
        ids: Tensor = found["input_ids"]
        return ids

    def _synthetic_texts(self, seed: int) -> tuple[Tensor, Tensor]:
        """Return texts [N, length] and labels [N]; each class prefers its own words."""
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(_CLASSES, (self.samples,), generator=generator)
        words = torch.randint(
            _FIRST_WORD,
            _VOCABULARY,
            (self.samples, self.length),
            generator=generator,
        )
        share = (_VOCABULARY - _FIRST_WORD) // _CLASSES
        own = (
            _FIRST_WORD
            + labels.unsqueeze(1) * share
            + (words - _FIRST_WORD) % share
        )
        ids = torch.where(
            torch.rand(words.shape, generator=generator) < 0.5, own, words
        )
        lengths = torch.randint(
            self.length // 2,
            self.length + 1,
            (self.samples, 1),
            generator=generator,
        )
        return ids.masked_fill_(
            torch.arange(self.length) >= lengths, _PADDING
        ), labels

    def model(self) -> nn.Module:
        """Return a BertForSequenceClassification, which gives logits [B, classes]."""
        from transformers import BertConfig, BertForSequenceClassification

        if not self.synthetic:
            found: nn.Module = BertForSequenceClassification.from_pretrained(
                self.pretrained, num_labels=_CLASSES, dtype=torch.float32
            )
            return found
        config = BertConfig(
            vocab_size=_VOCABULARY,
            max_position_embeddings=max(512, self.length),
            num_labels=_CLASSES,
            **GEOMETRIES[self.geometry],
        )
        made: nn.Module = BertForSequenceClassification(config)
        return made

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the logits [B, classes]; padding is masked.

        If the mask had the shape [B, L], transformers would wait in each
        forward pass for the device's answer whether anything is masked. A bool
        mask [B, 1, 1, L] is used unchanged, without waiting.
        """
        ids = batch[0]
        logits: Tensor = model(
            input_ids=ids, attention_mask=(ids != _PADDING)[:, None, None, :]
        ).logits
        return logits

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return the mean cross entropy."""
        return F.cross_entropy(outputs, batch[1].long())

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Any]:
        """Return the accuracy, one value per sample."""
        return {
            "accuracy": outputs.argmax(1) == batch[1],
            **super().metrics(outputs, batch),
        }

"""BERT fine-tuned to classify texts, through transformers (`pip install
'paceline[bert]'`).
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from examples.synthetic import MaySynthesize
from trainers import ArrowDataset
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
"""Devlin et al. 2018 (tiny: for tests)."""
_PRETRAINED = {
    "base": "google-bert/bert-base-uncased",
    "large": "google-bert/bert-large-uncased",
}
_VOCABULARY = 30_522
_PADDING = 0
_FIRST_WORD = 1000  # BERT's tokens below are special or unused


class Tokens:
    """Texts as token ids [B, length], padded and cut; each process loads the tokenizer
    once.
    """

    def __init__(self, name: str, length: int) -> None:
        self.name = name
        self.length = length

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "length": self.length}

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.name)

    def __call__(self, texts: list[str]) -> Tensor:
        """int64 [B, length]."""
        found = self._tokenizer(
            texts,
            padding="max_length",
            truncation=True,
            max_length=self.length,
            return_tensors="pt",
        )
        ids: Tensor = found["input_ids"]
        return ids


class Bert(MaySynthesize):
    """Classify B texts [B, length] (token ids, padded with 0).

    `train`, `val`: Parquet or Arrow files with the columns `text` and `label`.
    `geometry`: base, large, or tiny. `pretrained`: a name on the Hugging Face hub or a
    directory (default: Google's of that geometry). With `synthetic` nothing is
    downloaded: the model has the geometry and random weights, and there are `samples`
    texts of random words.
    """

    def __init__(
        self,
        train: str | None = None,
        val: str | None = None,
        text: str = "text",
        label: str = "label",
        classes: int = 2,
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
        self.columns = [text, label]
        self.classes = classes
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
            Tokens(self.pretrained or "", self.length)(["a text"])
        except OSError as error:
            raise ConfigError(
                "task_args.pretrained",
                self.pretrained,
                f"cannot be had ({str(error).splitlines()[0]})",
                "name a directory that holds it, or set `task_args: {synthetic: true}`",
            ) from error

    def dataset(self, split: str) -> Dataset[Any]:
        """Token ids [length] and label of each text."""
        if not self.synthetic:
            columns = self.columns
            decode = {columns[0]: Tokens(self.pretrained or "", self.length)}
            return ArrowDataset(self.files[split] or "", columns, decode=decode)
        return TensorDataset(*self._synthetic_texts(1 + (split == "val")))

    def _synthetic_texts(self, seed: int) -> tuple[Tensor, Tensor]:
        """Texts of every length; a class prefers words of its own share of the
        vocabulary.
        """
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(self.classes, (self.samples,), generator=generator)
        words = torch.randint(
            _FIRST_WORD, _VOCABULARY, (self.samples, self.length), generator=generator
        )
        share = (_VOCABULARY - _FIRST_WORD) // self.classes
        own = _FIRST_WORD + labels.unsqueeze(1) * share + (words - _FIRST_WORD) % share
        ids = torch.where(
            torch.rand(words.shape, generator=generator) < 0.5, own, words
        )
        lengths = torch.randint(
            self.length // 2, self.length + 1, (self.samples, 1), generator=generator
        )
        return ids.masked_fill_(torch.arange(self.length) >= lengths, _PADDING), labels

    def model(self) -> nn.Module:
        """Transformers' BertForSequenceClassification: logits [B, classes]."""
        from transformers import BertConfig, BertForSequenceClassification

        if not self.synthetic:
            found: nn.Module = BertForSequenceClassification.from_pretrained(
                self.pretrained, num_labels=self.classes, dtype=torch.float32
            )
            return found
        config = BertConfig(
            vocab_size=_VOCABULARY,
            max_position_embeddings=max(512, self.length),
            num_labels=self.classes,
            **GEOMETRIES[self.geometry],
        )
        made: nn.Module = BertForSequenceClassification(config)
        return made

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """Logits; padding is masked.

        Of a mask [B, L] Transformers asks the device whether anything is masked at all,
        and waits for that in each forward; one that is bool [B, 1, 1, L] it takes as it
        is.
        """
        ids = batch[0]
        logits: Tensor = model(
            input_ids=ids, attention_mask=(ids != _PADDING)[:, None, None, :]
        ).logits
        return logits

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """Cross entropy."""
        return F.cross_entropy(outputs, batch[1].long())

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Any]:
        """Accuracy, one value a sample."""
        return {
            "accuracy": outputs.argmax(1) == batch[1],
            **super().metrics(outputs, batch),
        }

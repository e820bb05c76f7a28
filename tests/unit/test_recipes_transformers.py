"""transformers' models and collators as people write them, each beside a plain
loop: equal loss curves.
"""

import functools
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    DefaultDataCollator,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.unit.test_evaluation import run
from tests.unit.test_loop import check_resume
from tests.unit.test_recipes import BATCH, SEED, curve, descend, order
from trainers.task import Task

pytestmark = pytest.mark.full

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = 35
ROW = 16


@functools.cache
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = SPECIAL + [f"w{number}" for number in range(WORDS - len(SPECIAL))]
    made = Tokenizer(
        models.WordLevel(
            {word: number for number, word in enumerate(words)},
            unk_token=SPECIAL[1],
        )
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {
        "pad": "[PAD]",
        "unk": "[UNK]",
        "cls": "[CLS]",
        "sep": "[SEP]",
        "mask": "[MASK]",
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        **{f"{name}_token": word for name, word in names.items()},
    )


def bert(kind):
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    dropout = {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout": 0.0,
    }
    model = kind(
        BertConfig(
            vocab_size=WORDS,
            num_labels=3,
            max_position_embeddings=ROW,
            **sizes,
            **dropout,
        )
    )
    return model.double()


def gpt2():
    """Without a cache, for with one it looks from a flattened sequence into
    those before.
    """
    sizes = {
        "vocab_size": WORDS,
        "n_positions": ROW,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "use_cache": False,
    }
    dropout = {
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout)).double()


def t5():
    sizes = {
        "vocab_size": WORDS,
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
    }
    return T5ForConditionalGeneration(
        T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    ).double()


class Sentences(Dataset[Any]):
    """What a tokenizer gives for sentences of 1 to 12 words, with labels as
    each kind of training has them.
    """

    def __init__(self, kind, split):
        self.kind = kind
        generator = torch.Generator().manual_seed(len(split))
        lengths = (
            [6] * 33
            if kind == "default"
            else torch.randint(1, 13, (33,), generator=generator).tolist()
        )
        self.sentences = [
            torch.randint(0, WORDS - 5, (n,), generator=generator).tolist()
            for n in lengths
        ]

    def __len__(self):
        return len(self.sentences)

    def __getitem__(self, index):
        words = self.sentences[index]
        sample = tokenizer()(" ".join(f"w{word}" for word in words))
        if self.kind in ("padded", "default"):
            sample["label"] = sum(words) % 3
        if self.kind == "tokens":  # each fifth sentence has no label at all
            sample["labels"] = [
                -100,
                *(
                    [-100] * len(words)
                    if index % 5 == 0
                    else (w % 3 for w in words)
                ),
                -100,
            ]
        if self.kind == "seq2seq":
            sample["labels"] = [
                5 + word for word in words[::-1][: 1 + index % 4]
            ] + [3]
        return sample


KINDS = {
    "padded": (
        lambda: DataCollatorWithPadding(tokenizer()),
        lambda: bert(BertForSequenceClassification),
        1e-12,
    ),
    "default": (
        DefaultDataCollator,
        lambda: bert(BertForSequenceClassification),
        1e-12,
    ),
    "tokens": (
        lambda: DataCollatorForTokenClassification(tokenizer()),
        lambda: bert(BertForTokenClassification),
        1e-12,
    ),
    "masked": (
        lambda: DataCollatorForLanguageModeling(
            tokenizer(), mlm_probability=0.3
        ),
        lambda: bert(BertForMaskedLM),
        1e-12,
    ),
    "causal": (
        lambda: DataCollatorForLanguageModeling(tokenizer(), mlm=False),
        gpt2,
        1e-6,
    ),
    "flattened": (DataCollatorWithFlattening, gpt2, 1e-6),
    "seq2seq": (lambda: DataCollatorForSeq2Seq(tokenizer()), t5, 1e-6),
}
"""Collator and model; the tolerance is float32's where the model computes its
loss or its norms in that.
"""


class Collated(Task):
    """A collator of transformers as it is, and the loss that the model gives."""

    def __init__(self, kind):
        self.kind = kind
        self.collate = KINDS[kind][0]()

    def model(self):
        return KINDS[self.kind][1]()

    def dataset(self, split):
        return Sentences(self.kind, split)

    def loss(self, outputs, batch):
        return outputs.loss

    def weight(self, batch):
        labels = batch["labels"]
        if self.kind in ("causal", "flattened"):
            labels = labels[:, 1:]  # nothing predicts the first token
        return (labels != -100).sum()


def whole_batches(task):
    """A loop as PyTorch's tutorials have it, over the steps of the same order."""
    data = task.dataset("train")
    torch.manual_seed(SEED)
    model = task.model()
    optimizer = SGD(model.parameters(), 0.2)
    torch.manual_seed(SEED)  # as a run's steps begin
    batches = (
        task.collate([data[index] for index in at]) for at in order(task)
    )
    return [descend(optimizer, model(**batch).loss) for batch in batches]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "masked"])
@pytest.mark.parametrize(("microbatch", "num_workers"), [(1, 0), (4, 1)])
def test_a_collator_as_it_is(kind, microbatch, num_workers, tmp_path):
    ours = curve(
        Collated(kind), tmp_path, microbatch, data={"num_workers": num_workers}
    )
    assert ours == pytest.approx(
        whole_batches(Collated(kind)), rel=KINDS[kind][2]
    )


def test_hidden_words_are_the_same_after_a_resume(tmp_path):
    steps = {
        "epochs": 2,
        "global_batch_size": BATCH,
        "microbatch_size": 2,
        "checkpoint": {"every_steps": 4},
    }
    check_resume(
        tmp_path,
        lambda: Collated("masked"),
        8,
        **steps,
        data={"num_workers": 2},
    )


@pytest.mark.parametrize("kind", ["tokens", "flattened"])
def test_an_evaluation_in_batches_is_one_over_all_tokens(kind):
    size = 4
    task = Collated(kind)
    data = Sentences(kind, "val")
    model = KINDS[kind][1]()
    wanted = model(
        **task.collate([data[index] for index in range(33)])
    ).loss.item()
    assert run(task, data, size, model)["val_loss"] == pytest.approx(
        wanted, rel=KINDS[kind][2]
    )

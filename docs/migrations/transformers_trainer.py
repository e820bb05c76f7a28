"""Run as: python transformers_trainer.py"""

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)


def sentences(count, seed):
    words = torch.randint(
        1, 60, (count, 8), generator=torch.Generator().manual_seed(seed)
    )
    return [{"input_ids": line, "labels": (line[0] > line[1]).long()} for line in words]


def build_model():
    config = BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def compute_metrics(evaluation):
    return {
        "accuracy": (evaluation.predictions.argmax(1) == evaluation.label_ids).mean()
    }


if __name__ == "__main__":
    set_seed(0)
    arguments = TrainingArguments(
        output_dir="sentences",
        num_train_epochs=3,
        per_device_train_batch_size=16,
        learning_rate=5e-3,
        lr_scheduler_type="linear",
        eval_strategy="epoch",
        save_strategy="epoch",
        seed=0,
    )
    trainer = Trainer(
        build_model(),
        arguments,
        train_dataset=sentences(512, seed=1),
        eval_dataset=sentences(128, seed=2),
        compute_metrics=compute_metrics,
    )
    trainer.train()
    print(trainer.evaluate())

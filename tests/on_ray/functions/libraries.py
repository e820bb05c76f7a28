"""Training functions for Ray Train in Lightning, Accelerate and transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def rows(count: int = 192) -> TensorDataset:
    """Points in the plane, and on which side of a parabola each lies."""
    points = torch.randn(count, 2, generator=torch.Generator().manual_seed(20))
    return TensorDataset(points, (points[:, 1] > points[:, 0].square() - 0.5).long())


def lightning_on_ray(config: dict[str, Any]) -> None:
    """Ray Train with Lightning: Ray's strategy, environment and callback, which saves and reports after each epoch."""
    import lightning.pytorch as lightning
    from ray.train.lightning import (
        RayDDPStrategy,
        RayLightningEnvironment,
        RayTrainReportCallback,
        prepare_trainer,
    )

    class Sides(lightning.LightningModule):
        def __init__(self, lr: float) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.lr = lr
            self.layers = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 2))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            points, sides = batch
            loss = nn.functional.cross_entropy(self.layers(points), sides)
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=self.lr)

    lightning.seed_everything(21)
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices="auto",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer = prepare_trainer(trainer)
    trainer.fit(Sides(config["lr"]), DataLoader(rows(), batch_size=config["batch_size"], shuffle=True))


def lightning_alone(config: dict[str, Any]) -> None:
    """Lightning's own Trainer on one device, with a callback by the user that reports what was validated."""
    import lightning.pytorch as lightning
    import ray.train

    class Report(lightning.Callback):
        def on_validation_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
            if not trainer.sanity_checking:
                ray.train.report({name: value.item() for name, value in trainer.callback_metrics.items()})

    class Data(lightning.LightningDataModule):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(rows(), batch_size=config["batch_size"], shuffle=True)

        def val_dataloader(self) -> DataLoader[Any]:
            return DataLoader(rows(64), batch_size=64)

    class Sides(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 2))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            scores = self.layers(batch[0])
            self.log("loss", nn.functional.cross_entropy(scores, batch[1]))
            self.log("accuracy", (scores.argmax(dim=1) == batch[1]).float().mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}

    lightning.seed_everything(22)
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=1,
        precision=config["precision"],
        callbacks=[Report()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Sides(), datamodule=Data())


def accelerated(config: dict[str, Any]) -> None:
    """Ray Train with Accelerate: everything prepared by an Accelerator, which also gathers what was predicted."""
    import ray.train
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=config["accumulate"])
    set_seed(23)
    model: Any = nn.Sequential(nn.Linear(2, 12), nn.ReLU(), nn.Linear(12, 2))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    training: Any = DataLoader(rows(), batch_size=config["batch_size"], shuffle=True)
    held_out: Any = DataLoader(rows(90), batch_size=32)
    model, optimizer, schedule, training, held_out = accelerator.prepare(model, optimizer, schedule, training, held_out)
    for epoch in range(3):
        model.train()
        for points, sides in training:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(points), sides)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        right, seen = 0, 0
        for points, sides in held_out:
            with torch.no_grad():
                guesses = model(points).argmax(dim=1)
            guesses, sides = accelerator.gather_for_metrics((guesses, sides))
            right, seen = right + int((guesses == sides).sum()), seen + len(sides)
        ray.train.report({"epoch": epoch, "loss": loss.item(), "accuracy": right / seen, "held_out": seen})


def transformers_trainer(config: dict[str, Any]) -> None:
    """Ray Train with transformers: its Trainer, a small BERT without weights from outside, and Ray's callback."""
    import ray.train
    from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
    from torch.utils.data import Dataset
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

    class Sentences(Dataset[dict[str, torch.Tensor]]):
        """Eight words each; whether the first is among the later half of the vocabulary."""

        def __init__(self, count: int, seed: int) -> None:
            self.words = torch.randint(5, 60, (count, 8), generator=torch.Generator().manual_seed(seed))

        def __len__(self) -> int:
            return len(self.words)

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            words = self.words[index]
            return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": (words[0] > 32).long()}

    set_seed(24)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=60,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=8,
        )
    )
    arguments = TrainingArguments(
        output_dir=f"bert-{ray.train.get_context().get_world_rank()}",  # the callback reads it while rank 0 writes
        num_train_epochs=2,
        learning_rate=config["learning_rate"],
        per_device_train_batch_size=config["per_device_train_batch_size"],
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=24,
    )
    trainer = Trainer(model, arguments, train_dataset=Sentences(96, 25), eval_dataset=Sentences(32, 26))
    trainer.add_callback(RayTrainReportCallback())
    trainer = prepare_trainer(trainer)
    trainer.train()


def transformers_accumulating(config: dict[str, Any]) -> None:
    """transformers' Trainer with a small GPT-2, accumulating gradients, and a callback by the user that reports."""
    import ray.train
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

    class Report(TrainerCallback):
        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **more: Any
        ) -> None:
            if logs and "loss" in logs:
                ray.train.report({"loss": logs["loss"], "grad_norm": logs["grad_norm"], "step": state.global_step})

    set_seed(27)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_positions=12, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1)
    )
    words = torch.randint(2, 40, (96, 12), generator=torch.Generator().manual_seed(28))
    sentences = [{"input_ids": line, "labels": line} for line in words]
    arguments = TrainingArguments(
        output_dir="gpt2",
        max_steps=12,
        learning_rate=0.01,
        lr_scheduler_type=config["schedule"],
        per_device_train_batch_size=8,
        gradient_accumulation_steps=config["accumulate"],
        logging_steps=4,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=27,
    )
    Trainer(model, arguments, train_dataset=sentences, callbacks=[Report()]).train()

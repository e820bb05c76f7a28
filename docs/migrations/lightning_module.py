"""Run as: python lightning_module.py"""

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def points(count, seed):
    plane = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(plane, (plane[:, 1] > plane[:, 0].square() - 0.5).long())


class Points(lightning.LightningModule):
    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))

    def training_step(self, batch, index):
        features, labels = batch
        loss = F.cross_entropy(self.layers(features), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        features, labels = batch
        outputs = self.layers(features)
        self.log("val_loss", F.cross_entropy(outputs, labels))
        self.log("val_accuracy", (outputs.argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
        return [optimizer], [scheduler]


if __name__ == "__main__":
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        max_epochs=5, strategy="ddp", devices=1, gradient_clip_val=1.0
    )
    training = DataLoader(points(1024, seed=1), batch_size=64, shuffle=True)
    held_out = DataLoader(points(256, seed=2), batch_size=64)
    trainer.fit(Points(), training, held_out)
    print({name: value.item() for name, value in trainer.callback_metrics.items()})

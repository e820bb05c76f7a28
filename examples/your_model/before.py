"""A typical training script, with model, data, training loop and evaluation.

Run as: python examples/your_model/before.py
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

SEED = 0
EPOCHS = 20
BATCH = 64
LR = 0.01


def spirals(samples: int, seed: int) -> TensorDataset:
    """Return points [N, 2] on three noisy arms, and the arm of each point [N]."""
    generator = torch.Generator().manual_seed(seed)
    arms = torch.randint(3, (samples,), generator=generator)
    radius = torch.rand(samples, generator=generator)
    angle = (
        4.0 * radius
        + arms * 2.0944
        + 0.2 * torch.randn(samples, generator=generator)
    )
    return TensorDataset(
        torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arms
    )


def build_model() -> nn.Module:
    """Return a model that turns points [B, 2] into logits [B, 3]."""
    return nn.Sequential(
        nn.Linear(2, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 3),
    )


def train(epochs: int = EPOCHS) -> list[float]:
    """Train, and return the loss of every step."""
    torch.manual_seed(SEED)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    training = spirals(3000, seed=1)
    validation = spirals(600, seed=2)
    losses = []
    for epoch in range(epochs):
        model.train()
        sampler = RandomSampler(
            training, generator=torch.Generator().manual_seed(SEED + epoch)
        )
        for points, arms in DataLoader(
            training, batch_size=BATCH, sampler=sampler
        ):
            points = points.to(device)
            arms = arms.to(device)
            loss = F.cross_entropy(model(points), arms)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            right = sum(
                (model(points.to(device)).argmax(1).cpu() == arms).sum().item()
                for points, arms in DataLoader(validation, batch_size=BATCH)
            )
        print(
            f"epoch {epoch + 1}: loss {losses[-1]:.4f}, validation accuracy {right / len(validation):.4f}"
        )
    return losses


if __name__ == "__main__":
    train()

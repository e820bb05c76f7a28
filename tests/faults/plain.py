"""The same work as Ray documents it: a TorchTrainer that reports checkpoints, and a Tuner over it, by nobody's wrapper.

Run as: python -m tests.faults.plain run|sweep DIRECTORY
https://docs.ray.io/en/latest/train/user-guides/fault-tolerance.html: `FailureConfig(max_failures)`, a checkpoint every
few steps, the same name and storage path go on with a run; for Tune, `Tuner.restore` where it can. The loop keeps
epoch and batch in its checkpoint and skips the batches that it had, as a careful user would.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from tests.faults import hook
from tests.faults.scenarios import INTERVAL, PLAIN_TRIALS, STEPS, TRIAL_STEPS
from tests.faults.task import Rows, make_model

BATCH = 12
_MAX_FAILURES = 3


def train(config: dict[str, Any]) -> None:
    """What each worker of the TorchTrainer runs."""
    import ray.train
    import ray.train.torch

    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    hook.trial = config["trial"]
    hook.event("setup")
    torch.manual_seed(config["trial"])
    bare = make_model()
    hook.event("model")
    model = ray.train.torch.prepare_model(bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    step = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory, "state.pt"), map_location="cpu", weights_only=True)
        bare.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    data = Rows("train")
    sampler: DistributedSampler[Any] = DistributedSampler(data, world_size, rank, seed=config["trial"])
    loader = DataLoader(data, batch_size=BATCH // world_size, sampler=sampler)
    while step < config["steps"]:
        epoch, skipped = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        for number, (rows, labels, indices) in enumerate(loader):
            if number < skipped:
                continue
            if step == config["steps"]:
                break
            step += 1
            hook.note_rank(rank)
            hook.event("step", step)
            hook.record(step, rank, indices.tolist())
            hook.event("forward", step)
            outputs = model(rows)
            outputs.register_hook(lambda gradient, step=step: _backward(step))
            loss = F.cross_entropy(outputs, labels)
            if hook.event("loss", step) == "nan":
                loss = loss * float("nan")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % INTERVAL == 0 or step == config["steps"]:
                _keep(rank, step, bare, optimizer, float(loss))


def _backward(step: int) -> None:
    hook.event("backward", step)


def _keep(rank: int, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: float) -> None:
    import ray.train

    with tempfile.TemporaryDirectory() as directory:
        kept = None
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, Path(directory, "state.pt"))
            kept = ray.train.Checkpoint.from_directory(directory)
        ray.train.report({"train_loss": loss, "step": step}, checkpoint=kept)


def trainer(directory: Path, name: str, workers: int, trial: int, steps: int, callbacks: list[Any]) -> Any:
    """A TorchTrainer in the case's directory."""
    import ray.train
    from ray.train.torch import TorchTrainer

    return TorchTrainer(
        train,
        train_loop_config={"trial": trial, "steps": steps},
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=str(directory / "runs"),
            failure_config=ray.train.FailureConfig(max_failures=_MAX_FAILURES),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            callbacks=callbacks,
        ),
    )


def run(directory: Path) -> None:
    """One run."""
    trainer(directory, "run", 2, 0, STEPS, []).fit()


def sweep(directory: Path) -> None:
    """A trial for each seed, two at a time; goes on with what Tune has kept."""
    from ray import tune
    from ray.tune.integration.ray_train import TuneReportCallback

    def drive(config: dict[str, Any]) -> None:
        number = config["task_args.trial"]
        result = trainer(directory, f"trial-{number}", 1, number, TRIAL_STEPS, [TuneReportCallback()]).fit()
        record = {"config": config, "status": "done", "metrics": {"train_loss": result.metrics["train_loss"]}}
        (directory / "finished" / f"{number}.json").write_text(json.dumps(record))  # for the oracle's eyes

    where = str(directory / "runs" / "run")
    trainable = tune.with_resources(drive, {"CPU": 0.001})
    if tune.Tuner.can_restore(where):
        tuner = tune.Tuner.restore(where, trainable, resume_unfinished=True, restart_errored=True)
    else:
        tuner = tune.Tuner(
            trainable,
            param_space={"task_args.trial": tune.grid_search(list(range(PLAIN_TRIALS)))},
            tune_config=tune.TuneConfig(max_concurrent_trials=2),
            run_config=tune.RunConfig(name="run", storage_path=str(directory / "runs")),
        )
    results = tuner.fit()
    if results.errors:
        raise RuntimeError(f"{len(results.errors)} trials failed: {results.errors[0]}")


if __name__ == "__main__":
    {"run": run, "sweep": sweep}[sys.argv[1]](Path(sys.argv[2]))

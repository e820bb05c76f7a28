"""A stranger's first script with the drop-in.

Run as: first_script.py HOW, where HOW is ours-first, init-first or no-init:
the order of imports and `ray.init()`.
"""

import sys
import tempfile

HOW = sys.argv[1]

if HOW == "init-first":
    import ray

    ray.init(num_cpus=2, include_dashboard=False)

if HOW == "ours-first":
    from tune.ray import TorchTrainer, Tuner

import ray.train  # noqa: E402
import ray.train.torch  # noqa: E402
from ray.train import RunConfig, ScalingConfig  # noqa: E402
from ray.tune.integration.ray_train import TuneReportCallback  # noqa: E402

if HOW != "ours-first":
    from tune.ray import TorchTrainer, Tuner

SCALING = {"num_workers": 1}


def train(config):
    assert ray.get(ray.put(config)) == config  # it joins the cluster
    ray.train.report({"double": 2 * config["size"]})


def driver(config):
    assert ray.get(ray.put(config)) == config
    TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(**SCALING),
        run_config=RunConfig(
            storage_path=storage, callbacks=[TuneReportCallback()]
        ),
    ).fit()


if __name__ == "__main__":
    storage = tempfile.mkdtemp()
    if HOW == "ours-first":
        ray.init()
    results = Tuner(
        driver, param_space={"size": ray.tune.grid_search([1, 2])}
    ).fit()
    print(
        "DOUBLES",
        sorted(result.metrics["double"] for result in results),
        list(results.errors),
    )
    if HOW == "no-init":  # and the script goes on, with Ray's own
        ray.train.torch.TorchTrainer(
            train,
            train_loop_config={"size": 3},
            scaling_config=ScalingConfig(**SCALING),
            run_config=RunConfig(storage_path=storage),
        ).fit()

"""What is known of a user's training function before and between its trials."""

import functools
import json
import types

import pytest
import ray.train
from ray.tune import TuneConfig
from ray.tune.schedulers import (
    ASHAScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
)

import tests.unit.test_ray_functions
from tune.ray.pool import Pool, most_lanes
from tune.ray.shape import Shape, likely_scaling, makes_trainer
from tune.ray.trainer import with_own_name
from tune.ray.tuner import _Pace, likely_shape

SCALING = {"num_workers": 2}
made = []


def ScalingConfig(**given):
    made.append(given)


def literal(config):
    ScalingConfig(num_workers=2, use_gpu=False, resources_per_worker={"CPU": 2})


def splatted(config):
    ScalingConfig(**SCALING)


def computed(config):
    ScalingConfig(num_workers=config["workers"], placement_strategy="SPREAD")


def unknown_name(config):
    ScalingConfig(num_wokers=2)


def labelled(config):
    ScalingConfig(num_workers=2, label_selector=[{"zone": "a"}, {"zone": "b"}])


def test_the_likely_lane_is_read_and_not_run():
    inside = 4

    def enclosed(config):
        ScalingConfig(num_workers=inside)

    assert likely_scaling(literal) == {
        "num_workers": 2,
        "use_gpu": False,
        "resources_per_worker": {"CPU": 2},
    }
    assert likely_scaling(enclosed) == {"num_workers": 4}
    assert likely_scaling(splatted) == SCALING
    assert likely_scaling(computed) == {}, (
        "half of it would be a guess at another group"
    )
    assert likely_scaling(len) == likely_scaling(lambda config: None) == {}
    assert made == []


@pytest.mark.parametrize(
    ("driver", "num_workers"),
    [(literal, 2), (splatted, 2), (computed, 1), (labelled, 2), (unknown_name, None)],
)
def test_no_guess_at_the_first_lane_fails_a_run(driver, num_workers):
    shape = likely_shape(driver)
    assert (shape and shape.num_workers) == num_workers


def TorchTrainer(*args, **given):
    made.append(given)


def build(config):
    TorchTrainer(literal, train_loop_config=config)


def calls_another(config):
    build(config)


def imports_inside(config):
    from ray.train.torch import TorchTrainer

    TorchTrainer(literal)


def with_module(config):
    tests.unit.test_ray_functions.build(config)


def plain(config):
    return float(
        len(
            [
                made,
                json.dumps(config),
                types.FunctionType,
                types.MethodType,
                Pool,
                functools.partial,
            ]
        )
    )


def test_a_function_that_makes_a_trainer_is_told_from_one_that_trains_itself():
    def enclosing(function):
        return lambda config: function(config)

    def recursive(config):
        recursive(later(config))

    assert not makes_trainer(recursive)  # one of its cells is empty still
    assert likely_scaling(recursive) == {}

    def later(config):
        return build(config)

    def given_the_class(trainer_class):
        return lambda config: trainer_class(literal)

    assert makes_trainer(recursive)
    assert makes_trainer(given_the_class(type("TorchTrainer", (), {})))
    for driver in (
        build,
        calls_another,
        imports_inside,
        with_module,
        enclosing(build),
        functools.partial(build),
    ):
        assert makes_trainer(driver), driver
    for function in (plain, enclosing(plain), functools.partial(plain), len):
        assert not makes_trainer(function), function
    assert made == []


def test_a_cluster_holds_so_many_lanes():
    shape = Shape(2, (("CPU", 2.0), ("GPU", 1.0)), "PACK", (), "{}")
    assert most_lanes(shape, {"CPU": 16.0, "GPU": 5.0}) == 2
    assert most_lanes(shape, {"CPU": 7.0, "GPU": 8.0}) == 1
    assert most_lanes(shape, {"CPU": 1.0}) == 1


@pytest.mark.parametrize(
    ("scheduler", "is_paced"),
    [
        (None, True),
        (ASHAScheduler(), True),
        (MedianStoppingRule(), True),
        (HyperBandScheduler(), False),
        (PopulationBasedTraining(hyperparam_mutations={"lr": [0.1, 0.2]}), False),
    ],
)
def test_trials_that_are_compared_or_let_pause_all_run(scheduler, is_paced):
    config = TuneConfig(scheduler=scheduler)
    _Pace("pool").limit(config)
    assert getattr(config.search_alg, "max_concurrent", None) == (
        1 if is_paced else None
    )


def test_no_run_goes_on_from_another_that_began_in_the_same_second():
    unnamed = ray.train.RunConfig()
    named = ray.train.RunConfig(name="mine")
    assert len({with_own_name(unnamed).name for _ in range(3)} | {unnamed.name}) == 4
    assert with_own_name(named).name == "mine"

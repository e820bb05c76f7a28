"""What is known of a user's training function before and between its trials."""

import contextlib
import functools
import json
import os
import socket
import sys
import threading
import traceback
import types
import uuid

import pytest
import ray.train
import ray.tune
import torch
from ray import cloudpickle
from ray.tune import TuneConfig
from ray.tune.schedulers import (
    ASHAScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
)

import tests.unit.test_ray_functions
from tune.forks.assignment import Place
from tune.forks.client import Zygote
from tune.forks.function import picklable, run_function
from tune.lanes.controller import NoGroup
from tune.ray._controller import Shape
from tune.ray._pool import Pool, most_lanes
from tune.ray.trainer import with_own_name
from tune.ray.tuner import Tuner, _Pace, in_lanes, makes_trainer, without_exits

made = []


def literal(config):
    made.append(config)


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
        (
            PopulationBasedTraining(hyperparam_mutations={"lr": [0.1, 0.2]}),
            False,
        ),
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
    assert (
        len({with_own_name(unnamed).name for _ in range(3)} | {unnamed.name})
        == 4
    )
    assert with_own_name(named).name == "mine"


def test_an_exit_amid_a_collection_is_not_shown(capsys, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", without_exits)

    class Ends:
        def __init__(self, error):
            self.error = error

        def __del__(self):
            raise self.error

    Ends(SystemExit(1))
    assert capsys.readouterr().err == ""
    Ends(KeyError("lost"))
    assert "KeyError" in capsys.readouterr().err


def leaves(error):
    """A function without a module, whose pickle imports nothing."""

    def function(config=None):
        raise error

    return function


@pytest.fixture(scope="module")
def parent():
    with contextlib.closing(
        Zygote.of_functions(uuid.uuid4().hex[:12])
    ) as zygote:
        yield zygote


def driven(parent, driver):
    packed = cloudpickle.dumps(driver), cloudpickle.dumps({"lr": 1})
    return parent.fork("tune.ray._driver:run_driver", *packed).serve(None)


@pytest.mark.parametrize(
    ("driver", "outcome"),
    [
        (leaves(SystemExit(0)), RuntimeError),
        (leaves(StopIteration()), RuntimeError),
        (leaves(KeyboardInterrupt()), KeyboardInterrupt),
        (leaves(ValueError("wrong")), ValueError),
        (lambda config: threading.Lock(), TypeError),
        (lambda config: 4.5, None),
    ],
)
def test_a_driver_ends_with_what_it_raised_or_returned(
    driver, outcome, parent
):
    has_failed, found = driven(parent, driver)
    assert has_failed is (outcome is not None)
    assert type(found) is outcome if has_failed else found == 4.5


def reads(config):
    return config["lrr"]


def test_a_driver_is_what_it_is_when_tune_pickles_it():
    """Its parameters are in Ray's object store by then."""
    found = []
    run = in_lanes(lambda config: found, "pool")
    found.append(1)
    run = cloudpickle.loads(cloudpickle.dumps(run))
    assert cloudpickle.loads(run.__closure__[0].cell_contents)({}) == [1]


def test_a_sweep_is_restored_by_arguments_in_rays_order(tmp_path):
    with pytest.raises(FileNotFoundError):
        Tuner.restore(str(tmp_path), build, True, True)


@pytest.mark.parametrize(
    ("driver", "line"),
    [
        (reads, 'return config["lrr"]'),
        (leaves(SystemExit(0)), "raise error"),
    ],
)
def test_an_error_of_a_driver_shows_the_users_line(driver, line, parent):
    _, raised = driven(parent, driver)
    shown = "".join(traceback.format_exception(raised))
    assert line in shown
    assert f"in {driver.__name__}" in shown


def on_gpu_7(channel, *given):
    """Run in a trial: call `run_function` as if the node had two visible GPUs."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "4,7"
    torch.cuda.is_available = lambda: True
    torch.cuda.set_device = lambda device: setattr(torch, "current", device)
    return run_function(channel, *given)


def ended(parent, function, **answers):
    """Run a function in a fork, and return its outcome."""
    server = socket.create_server(("127.0.0.1", 0))
    place = Place(0, 1, 0, 1, 0, 0, *server.getsockname(), "gloo")
    given = cloudpickle.dumps(function), place, ["7"], "trial", None
    fork = parent.fork(f"{__name__}:on_gpu_7", *given, files=[server.fileno()])
    return fork.serve(types.SimpleNamespace(begins=lambda: None, **answers))


def test_a_rank_sees_its_nodes_gpus_and_starts_on_its_own(parent):
    """It may choose a GPU by LOCAL_RANK, by Ray's `get_device`, or not at all."""
    assert NoGroup().backend_cls.share_cuda_visible_devices
    assert ended(parent, lambda: torch.current.index)["returned"] == 1


def test_an_interrupt_that_a_function_raises_fails_its_trial(parent):
    found = ended(parent, leaves(KeyboardInterrupt()))
    assert found["status"] == "error"
    assert "KeyboardInterrupt was raised" in found["message"]


def reports():
    """Report to both of Ray's libraries, in another directory than the worker's."""
    os.chdir("/")
    for library in (ray.train, ray.tune):
        library.report(
            {}, checkpoint=library.Checkpoint.from_directory("ckpt")
        )


def test_a_checkpoint_is_sent_by_its_whole_path(parent):
    def report(metrics, checkpoint, **options):
        paths.append(checkpoint.path)

    paths = []
    ended(parent, reports, report=report)
    assert paths == ["/ckpt", "/ckpt"]


class OfTwoWordsError(Exception):
    """Cannot be unpickled, as many exceptions of libraries."""

    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def test_an_exception_that_cannot_be_pickled_is_passed_on_by_its_name_and_words():
    passed = picklable(OfTwoWordsError("out of", "luck"))
    assert str(passed) == "OfTwoWordsError: out of luck"
    error = ValueError("plain")
    assert picklable(error) is error

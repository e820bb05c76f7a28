"""The taxonomy of ends: classification, sentences, and errors that cross processes."""

from __future__ import annotations

import json
import pickle
import time

import pytest
import torch

from trainers.errors import (
    MISSING,
    POLICIES,
    STATUSES,
    CheckpointError,
    ConfigError,
    ConfigErrors,
    DivergedError,
    PacelineError,
    RunFailedError,
    Status,
    StorageError,
    classify,
    show,
)


def named(name: str, module: str = "ray.exceptions", base: type[Exception] = Exception) -> Exception:
    """An exception of a class that only its name tells."""
    return type(name, (base,), {"__module__": module})("gone")


class Preempted(Exception):  # noqa: N818
    preempted = True


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
        (MemoryError(), "out_of_host_memory"),
        (named("OutOfMemoryError"), "out_of_host_memory"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
            "out_of_host_memory",
        ),
        (OSError("Cannot allocate memory"), "error"),
        (DivergedError("nan"), "diverged"),
        (StorageError("full"), "error"),
        (CheckpointError("bad"), "error"),
        (ConfigError("a", 1, "is bad", "mend it"), "error"),
        (RunFailedError("hung", "no step for 60 s"), "hung"),
        (named("ActorDiedError"), "node_lost"),
        (named("NodeDiedError"), "node_lost"),
        (named("WorkerCrashedError"), "node_lost"),
        (Preempted(), "preempted"),
        (RuntimeError("shape mismatch"), "error"),
        (KeyError("x"), "error"),
    ],
)
def test_an_exception_has_its_status(error: Exception, status: Status) -> None:
    assert classify(error) == status


def test_a_real_failed_allocation_is_out_of_host_memory() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert classify(raised.value) == "out_of_host_memory"


def test_every_status_has_a_policy_and_every_failure_an_advice() -> None:
    assert set(POLICIES) == set(STATUSES)
    assert all(POLICIES[status].advice for status in STATUSES if status != "done")


def test_a_config_error_is_field_value_rule_fix() -> None:
    error = ConfigError("optimizer.lr", -1, "must be greater than 0", "write `lr: 0.1`", "train.yaml")
    assert str(error) == "train.yaml: `optimizer.lr` is -1, but must be greater than 0; write `lr: 0.1`."
    assert str(error.at("other.yaml")).startswith("other.yaml: ")
    assert str(ConfigError("task", MISSING, "is required", "did you mean `b`?")) == (
        "`task` is required; did you mean `b`?"
    )
    assert isinstance(error, ValueError)
    assert error.exit_code == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (False, "false"), (None, "null"), ("off", '"off"'), (1e-3, "0.001"), ([1, 2], "[1, 2]"), (0, "0")],
)
def test_values_are_shown_as_a_user_writes_them(value: object, text: str) -> None:
    assert show(value) == text


def test_a_long_value_is_cut_to_160_characters() -> None:
    assert len(show("x" * 500)) == 160


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a", MISSING, "is required", "add it", "f"),
        ConfigError("a", [1], "is bad", "mend it"),
        ConfigErrors([ConfigError("a", MISSING, "is required", "add it"), ConfigError("b", 2, "is bad", "mend it")]),
        DivergedError("nan"),
        RunFailedError("hung", "rank 1", 12.5, config=False),
        RunFailedError("error", "`a` is bad", 12.5, config=True),
    ],
)
def test_errors_cross_processes(error: PacelineError) -> None:
    back = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert (back.status, back.exit_code) == (error.status, error.exit_code)


def test_missing_stays_the_same_object_across_processes() -> None:
    assert pickle.loads(pickle.dumps(MISSING)) is MISSING  # noqa: S301


def test_a_failure_crosses_as_json_too() -> None:
    error = RunFailedError("out_of_memory", "rank 2: it was full", 3.5)
    back = RunFailedError(*json.loads(json.dumps(error.args)))
    assert (back.status, back.message, back.when, back.config) == ("out_of_memory", "rank 2: it was full", 3.5, False)


def fail() -> None:
    raise KeyError("first line\nsecond line")


def test_a_workers_exception_keeps_rank_kind_words_and_line() -> None:
    before = time.time()
    with pytest.raises(KeyError) as raised:
        fail()
    failure = RunFailedError.of(raised.value, 3)
    assert failure.status == "error"
    assert failure.message.startswith("rank 3: KeyError: ")
    assert "test_errors.py:" in failure.message
    assert "\n" not in failure.message
    assert before <= failure.when <= time.time()
    assert str(failure).startswith("the run ended as `error`: rank 3")


def test_a_workers_config_error_stays_a_sentence_with_exit_code_2() -> None:
    failure = RunFailedError.of(ConfigError("a", 1, "is bad", "mend it", "f.yaml"), 1)
    assert str(failure) == "f.yaml: `a` is 1, but is bad; mend it."
    assert failure.exit_code == 2


def test_a_failure_is_not_wrapped_again() -> None:
    failure = RunFailedError("hung", "rank 1", 1.0)
    assert RunFailedError.of(failure, 0) is failure


def test_the_cause_is_a_lost_worker_else_the_earliest() -> None:
    late, early = RunFailedError("error", "late", 2.0), RunFailedError("diverged", "early", 1.0)
    lost = RunFailedError("node_lost", "lost", 3.0)
    assert RunFailedError.first([late, early]) is early
    assert RunFailedError.first([late, lost, early]) is lost

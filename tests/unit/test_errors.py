"""The taxonomy of ends: classification, sentences, and errors that cross processes."""

import errno
import itertools
import os
import pickle
import signal
import time

import pytest
import torch
from torch.distributed import DistNetworkError
from torch.utils.data import DataLoader, Dataset

from trainers.causes import classify, death_of, failure_of
from trainers.errors import (
    MISSING,
    POLICIES,
    STATUSES,
    CheckpointError,
    ConfigError,
    ConfigErrors,
    DivergedError,
    RunFailedError,
    StorageError,
    TooLargeError,
)


def named(name, module="ray.exceptions", base=Exception):
    """An exception of a class that only its name tells."""
    return type(name, (base,), {"__module__": module})("gone")


NCCL_OUT_OF_MEMORY = (
    "NCCL error in: ProcessGroupNCCL.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
)


class Preempted(Exception):  # noqa: N818
    preempted = True


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
        (
            torch.AcceleratorError(
                "CUDA error: out of memory\nCUDA kernel errors might be asynchronous"
            ),
            "out_of_memory",
        ),
        (
            torch.distributed.DistBackendError(NCCL_OUT_OF_MEMORY),
            "out_of_memory",
        ),
        (RuntimeError("CUDA driver error: out of memory"), "out_of_memory"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "out_of_memory"),
        (
            RuntimeError(
                "MPS backend out of memory (MPS allocated: 18.00 GB)"
            ),
            "out_of_memory",
        ),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            "out_of_memory",
        ),
        (
            RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED"),
            "out_of_memory",
        ),
        (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), "out_of_memory"),
        (
            RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
            "out_of_memory",
        ),
        (
            RuntimeError(
                "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
            ),
            "out_of_memory",
        ),
        (
            RuntimeError(
                "GET was unable to find an engine to execute this computation"
            ),
            "out_of_memory",
        ),
        (
            torch.AcceleratorError(
                "CUDA error: an illegal memory access was encountered"
            ),
            "error",
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), "error"),
        (ValueError("CUDA ran out of memory, says the task"), "error"),
        (MemoryError(), "out_of_host_memory"),
        (named("OutOfMemoryError"), "out_of_host_memory"),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
            ),
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
def test_an_exception_has_its_status(error, status):
    assert classify(error) == status
    assert not (status == "out_of_memory" and failure_of(error, 0).follows)


def test_a_real_failed_allocation_is_out_of_host_memory():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert classify(raised.value) == "out_of_host_memory"


def test_every_status_has_a_policy_and_every_failure_an_advice():
    assert set(POLICIES) == set(STATUSES)
    assert all(
        POLICIES[status].advice for status in STATUSES if status != "done"
    )


def test_a_config_error_is_field_value_rule_fix():
    error = ConfigError(
        "optimizer.lr",
        -1,
        "must be greater than 0",
        "write `lr: 0.1`",
        "train.yaml",
    )
    assert (
        str(error)
        == "train.yaml: `optimizer.lr: -1` must be greater than 0; write `lr: 0.1`."
    )
    assert str(error.at("other.yaml")).startswith("other.yaml: ")
    assert str(
        ConfigError("task", MISSING, "is required", "did you mean `b`?")
    ) == ("`task` is required; did you mean `b`?")
    assert isinstance(error, ValueError)
    assert error.exit_code == 2


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a", MISSING, "is required", "add it", "f"),
        ConfigError("a", [1], "is bad", "mend it"),
        ConfigErrors(
            [
                ConfigError("a", MISSING, "is required", "add it"),
                ConfigError("b", 2, "is bad", "mend it"),
            ]
        ),
        DivergedError("nan"),
        RunFailedError("hung", "rank 1", 12.5, config=False),
        RunFailedError("error", "`a` is bad", 12.5, config=True),
    ],
)
def test_errors_cross_processes(error):
    back = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert (back.status, back.exit_code) == (error.status, error.exit_code)


def fail():
    raise KeyError("first line\nsecond line")


def test_a_workers_exception_keeps_rank_kind_words_and_line():
    before = time.time()
    with pytest.raises(KeyError) as raised:
        fail()
    failure = failure_of(raised.value, 3)
    assert failure.status == "error"
    assert failure.message.startswith("rank 3: KeyError: ")
    assert "test_errors.py:" in failure.message
    assert "\n" not in failure.message
    assert before <= failure.when <= time.time()
    assert str(failure).startswith("the run ended as `error`: rank 3")


def test_a_line_that_ends_in_a_colon_is_followed_by_what_it_announces():
    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    with pytest.raises(RuntimeError) as raised:
        model.load_state_dict(
            {f"module.{k}": v for k, v in model.state_dict().items()}
        )
    assert "Missing key" in failure_of(raised.value, 0).message


def first_of(errors):
    """The cause, which no order of arrival changes."""
    causes = {
        RunFailedError.first(list(order)).message
        for order in itertools.permutations(errors)
    }
    assert len(causes) == 1
    return RunFailedError.first(errors)


GLOO = RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [::1]:4913"
)


def test_the_cause_is_a_lost_worker_else_the_earliest():
    late = RunFailedError("error", "late", 2.0)
    early = RunFailedError("diverged", "early", 1.0)
    lost = RunFailedError("node_lost", "lost", 3.0)
    assert first_of([late, early]) is early
    assert first_of([late, lost, early]) is lost


@pytest.mark.parametrize(
    ("cause", "status"),
    [
        (death_of(2, -signal.SIGKILL, 4711), "node_lost"),
        (death_of(2, -signal.SIGSEGV), "node_lost"),
        (death_of(2, 3), "node_lost"),
        (failure_of(KeyboardInterrupt(), 2), "stopped"),
        (failure_of(ValueError("its own"), 2), "error"),
        (failure_of(ConfigError("a", 1, "is bad", "mend it"), 2), "error"),
        (failure_of(MemoryError(), 2), "out_of_host_memory"),
        (failure_of(TooLargeError(8, "full"), 2), "out_of_memory"),
        (
            RunFailedError(
                "hung", "rank 2 made no step for 9 s in setup", 9e9
            ),
            "hung",
        ),
    ],
)
def test_what_follows_from_another_rank_is_never_the_cause(cause, status):
    follow = [
        failure_of(GLOO, 0),
        failure_of(DistNetworkError("The client socket has timed out"), 1),
        RunFailedError(
            "hung",
            "rank 3 made no step for 9 s in the barrier after setup",
            1.0,
            follows=True,
        ),
        death_of(
            4, -signal.SIGABRT
        ),  # NCCL ends the process of whoever has lost the others
        death_of(5, -signal.SIGKILL, ended=True),
    ]
    cause.when = time.time() + 60  # though it comes last
    found = first_of([cause, *follow][:4])
    assert found.status == status
    assert found.message.startswith(cause.message)
    assert RunFailedError.first([*follow, cause]).status == status
    assert RunFailedError.first([cause, *follow]).status == status


def test_without_a_dead_rank_a_collectives_own_words_remain():
    failure = first_of([failure_of(GLOO, 0), failure_of(GLOO, 1)])
    assert failure.status == "error"
    assert failure.message.startswith(
        "rank 0: a collective failed, as it does if another rank ends: RuntimeError: "
    )
    assert "Connection closed by peer" in failure.message
    assert "network" in failure.advice


def test_a_rank_that_does_not_answer_and_is_ended_was_hung():
    """SIGSTOP: its watchdog is stopped with it, the other ranks wait, and the
    launcher kills it in the end.
    """
    waits = RunFailedError(
        "hung",
        "rank 0 made no step for 5 s in training, waiting for other ranks",
        1.0,
        follows=True,
    )
    failure = first_of([waits, death_of(1, -signal.SIGKILL, ended=True)])
    assert failure.status == "hung"
    assert (
        failure.message
        == f"{waits.message}; rank 1 did not answer and was ended by SIGKILL"
    )


def test_a_kill_by_the_kernel_for_memory_is_out_of_host_memory(monkeypatch):
    monkeypatch.setattr("trainers.causes._kills_before", -1)
    assert death_of(1, -signal.SIGKILL).status == "out_of_host_memory"
    assert death_of(1, -signal.SIGSEGV).status == "node_lost"


def loader_died(how):
    return RuntimeError(f"DataLoader worker (pid 4711) {how}")


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (
            loader_died("is killed by signal: Killed. "),
            "out_of_host_memory",
            "its DataLoader worker (pid 4711) was killed",
        ),
        (
            loader_died("is killed by signal: Terminated. "),
            "node_lost",
            "died: Terminated",
        ),
        (
            loader_died(
                "is killed by signal: Bus error. It is possible that dataloader's workers are out of ..."
            ),
            "out_of_host_memory",
            "(pid 4711) died by SIGBUS: shared memory is full (enlarge /dev/shm",
        ),
        (
            loader_died("is killed by signal: Segmentation fault. "),
            "error",
            "died: Segmentation fault",
        ),
        (
            loader_died(
                "exited unexpectedly with exit code 3. Details are lost due to multiprocessing."
            ),
            "error",
            "its DataLoader worker (pid 4711) exited unexpectedly with exit code 3",
        ),
        (
            RuntimeError(
                "unable to write to file </torch_17_4242_0>: No space left on device (28)"
            ),
            "out_of_host_memory",
            "shared memory is full",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "/data/x"),
            "error",
            "the disk is full: OSError",
        ),
        (
            OSError(errno.EDQUOT, "Disk quota exceeded"),
            "error",
            "the disk is full: OSError",
        ),
        (
            StorageError(
                "could not write /x: [Errno 28] No space left on device"
            ),
            "error",
            "the disk is full: StorageErr",
        ),
        (
            StorageError(
                "could not write /x: [Errno 30] Read-only file system"
            ),
            "error",
            "Read-only file system; fix the storage",
        ),
        (named("OutOfDiskError"), "error", "OutOfDiskError: gone"),
        (
            Exception("Local disk is full: Ray's object store cannot spill"),
            "error",
            "the disk is full: Exception",
        ),
        (
            named("WorkerHealthCheckTimeoutError"),
            "hung",
            "WorkerHealthCheckTimeoutError",
        ),
    ],
)
def test_the_system_s_own_failures_are_named(error, status, words):
    failure = failure_of(error, 0)
    assert failure.status == classify(error) == status
    assert words in failure.message
    assert not failure.follows
    assert isinstance(error, StorageError) <= (
        "traceback" not in failure.advice
    )


def test_a_full_disk_is_named_behind_any_other_exception():
    try:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise RuntimeError(
                "[enforce fail at inline_container.cc:672] unexpected pos 64 vs 0"
            ) from error
    except RuntimeError as error:
        failure = failure_of(error, 1)
    assert failure.message.startswith(
        "rank 1: the disk is full: RuntimeError: "
    )
    for error in (
        failure,
        StorageError("could not write /x: [Errno 122] Disk quota exceeded"),
    ):
        assert error.advice == (
            "free space there or raise the quota, then run the same command again to resume from the newest checkpoint"
        )


class Broken(Dataset[int]):
    """Fails at a sample, in a DataLoader's worker."""

    def __init__(self, act):
        self.act = act

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if self.act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise {"value": ValueError, "memory": MemoryError}[self.act](
            "sample 3\nis bad"
        )


@pytest.mark.parametrize(
    ("act", "status", "words"),
    [
        ("value", "error", "rank 0: ValueError: sample 3 (in"),
        ("memory", "out_of_host_memory", "rank 0: MemoryError: sample 3 (in"),
        ("kill", "out_of_host_memory", "was killed"),
    ],
)
def test_a_data_loaders_worker_s_error_is_its_cause(act, status, words):
    batches = iter(DataLoader(Broken(act), num_workers=1))
    with pytest.raises(Exception, match="DataLoader worker") as met:
        list(batches)
    batches._shutdown_workers()
    failure = failure_of(met.value, 0)
    assert failure.status == status
    assert words in failure.message
    assert "\n" not in failure.message

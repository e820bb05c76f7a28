"""Training functions of strangers: some leave their process as no trial should find it, some only look as if."""

import asyncio
import gc
import logging
import multiprocessing
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from trainers.devices.device import total_memory_bytes

MIB = 2**20
SEEN: list[int] = []
"""Module state, as careless scripts keep it."""


def train(epochs: int = 3, workers: int = 0) -> list[float]:
    """Losses of a plain loop; they depend on all that has a default: seeds, dtype, device, hooks, functions."""
    SEEN.append(len(SEEN))
    torch.manual_seed(len(SEEN))
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(epochs):
        for inputs, labels in DataLoader(data, 16, shuffle=True, num_workers=workers):
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def own_globals() -> None:
    SEEN.extend(range(5))


def package_containers() -> None:
    import parcel

    parcel.REGISTRY.append("mine")
    parcel.NESTED["a"]["b"] = [1]
    parcel.State.shared["device"] = "mine"
    parcel.State.kinds.add(train)
    parcel.RECENT.append(1)


def package_objects() -> None:
    import parcel

    parcel.DEFAULT.level = 7
    parcel.DEFAULT.seen.append(1)
    parcel.DEFAULT = parcel.Options()
    parcel.DEFAULT.level = 8


def package_code() -> None:
    import parcel

    parcel.double = lambda value: value
    parcel.State.method = lambda self: "mine"


def package_replaced() -> None:
    import parcel

    sys.modules["parcel"] = type(parcel)("parcel")


def torch_code() -> None:
    F.cross_entropy = lambda *args: torch.zeros((), requires_grad=True)
    nn.Linear.forward = lambda self, inputs: inputs @ self.weight.T
    torch.optim.Adam.step = lambda self: None
    nn.utils.clip_grad_norm_ = lambda *args: None
    torch.Tensor.backward = lambda self: None
    torch.utils.data.dataloader.default_collate = list


def dtype() -> None:
    torch.set_default_dtype(torch.float64)


def modes() -> None:
    torch.set_default_device("meta")
    torch.overrides.BaseTorchFunctionMode().__enter__()
    TorchDispatchMode().__enter__()
    torch.autograd.graph.save_on_cpu().__enter__()
    torch.no_grad().__enter__()


def module_hooks() -> None:
    nn.modules.module.register_module_forward_hook(lambda module, args, outputs: outputs * 0.5)
    register_optimizer_step_post_hook(lambda *args: None)


def seeds() -> None:
    torch.manual_seed(9)
    random.seed(9)
    np.random.seed(9)


def environment() -> None:
    os.environ["POISON"] = "1"
    os.environ["TZ"] = "Asia/Tokyo"
    time.tzset()
    os.environ.pop("HOME", None)


def gone_directory() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)


def signals() -> None:
    signal.signal(signal.SIGUSR1, lambda *args: None)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    signal.setitimer(signal.ITIMER_REAL, 3600)


def process() -> None:
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    multiprocessing.set_start_method("spawn", force=True)
    asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())


def interpreter() -> None:
    sys.path.insert(0, "/nowhere")
    sys.meta_path.insert(0, Finder())
    sys.settrace(lambda *args: None)
    threading.settrace(lambda *args: None)
    sys.excepthook = lambda *args: None
    sys.argv = ["mine"]
    gc.callbacks.append(lambda *args: None)
    gc.set_threshold(50_000)
    gc.disable()
    warnings.simplefilter("error")


class Finder:
    def find_spec(self, *args: Any) -> None:
        return None


def loggers() -> None:
    logging.getLogger("torch.distributed").addHandler(logging.StreamHandler())
    logging.getLogger("of.mine").setLevel(logging.DEBUG)
    logging.getLogger("of.mine").addFilter(lambda record: False)
    logging.getLogger().addHandler(logging.StreamHandler())


def child_forked() -> None:
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)


def child_orphaned() -> None:
    subprocess.run(["sh", "-c", "sleep 3600 & exit"], stdout=subprocess.DEVNULL, check=True)


def child_of_multiprocessing() -> None:
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,), daemon=True).start()


def group() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.new_group([0])


def file_of_python() -> None:
    keep(Path("log.txt").open("w"))  # noqa: SIM115


def server() -> None:
    keep(socket.create_server(("127.0.0.1", 0)))


def thread() -> Callable[[], None]:
    event = threading.Event()
    threading.Thread(target=event.wait, name="leaked", daemon=True).start()
    return event.set


def wait(event: threading.Event) -> None:
    event.wait()


def raw_file() -> Callable[[], None]:
    number = os.open(__file__, os.O_RDONLY)
    return lambda: os.close(number)


def standard_output() -> Callable[[], None]:
    before = os.dup(1)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.close(devnull)

    def undo() -> None:
        os.dup2(before, 1)
        os.close(before)

    return undo


def keep(what: Any) -> Callable[[], None]:
    """In a module that nobody watches."""
    import fractions

    fractions.kept = what
    return lambda: vars(fractions).pop("kept", None)


def tensor() -> Callable[[], None]:
    return keep(torch.ones(50 * MIB // 4))


def native_memory() -> Callable[[], None]:
    import ctypes

    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    held = libc.malloc(2**28 + total_memory_bytes(torch.device("cpu")) // 100)  # never touched
    return lambda: libc.free(held)


def plain() -> None:
    train()


def loader_with_workers() -> None:
    train(1, workers=2)


def accelerate_bf16() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Linear(8, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    for _ in range(3):
        accelerator.backward(model(torch.randn(2, 8)).float().sum())
        optimizer.step()
        optimizer.zero_grad()


def transformers_model() -> None:
    from transformers import AutoConfig, AutoModel, BertConfig, BertModel

    class Mine(BertConfig):
        model_type = "mine"

    AutoConfig.register("mine", Mine)  # a second time in one process, it refuses
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=64)
    assert isinstance(AutoModel.from_config(config), BertModel)
    model = AutoModel.from_config(config)
    model(torch.randint(0, 64, (2, 8))).last_hidden_state.mean().backward()

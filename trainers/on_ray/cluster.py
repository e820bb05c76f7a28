"""Join a Ray cluster, and leave it (Ray).

A run that the cluster can never hold is refused.

Environment read: RAY_ADDRESS names the cluster; without it an embedded one
starts on this machine.
"""

import atexit
import contextlib
import logging
import math
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import AuthenticationError
from ray.job_config import JobConfig

from trainers.config import TrainConfig
from trainers.config.function import FunctionConfig
from trainers.config.sections import ScalingConfig
from trainers.errors import ClusterError, ConfigError, counted, first_line
from trainers.launch.process import (
    embedded,
    own_cluster,
    without_collection,
)
from trainers.launch.spec import FunctionSpec, RunSpec
from trainers.on_ray import _reaper
from trainers.on_ray.capacity import Resources, capacity
from trainers.on_ray.environment import cluster_environment, run_environment
from trainers.on_ray.internals import (
    TOKEN_LOGGER,
    asks_for_token,
    has_token,
    keep_on_loopback,
    new_token,
    own_node,
    ray_directory,
    read_token_again,
    start_dashboard,
    without_extras,
)

logger = logging.getLogger(__name__)

_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"  # noqa: S105 (a name)
_LEAVE_S = 20.0  # Ray takes one or two seconds if all processes answer
_DASHBOARD_AFTER_S = 60.0
"""Time until the dashboard starts: its processes would slow a run that starts, or
a short sweep's trials.
"""
_SCRIPTS_END_S = 1.0
"""A script that ends within this time after its sweep needs no dashboard."""
_STARTS = 3
"""The most attempts to start an embedded cluster. Ray gives the processes of a
node 15 s to start, which is too short on a busy machine.
"""
_embedded = contextlib.ExitStack()
"""Ends the embedded cluster of this process; Ray, too, allows only one."""


def connect(
    show_workers: bool = True, metadata: dict[str, str] | None = None
) -> None:
    """Join the cluster that RAY_ADDRESS names, or start an embedded one.

    Args:
        show_workers: Whether workers' output appears in this terminal.
        metadata: What `ray job list` shows for this process, if it joins a
            cluster.
    """
    if ray.is_initialized():
        return
    if embedded():
        _start_embedded(show_workers)
    else:
        address = os.environ["RAY_ADDRESS"]
        _join(address, show_workers, JobConfig(metadata=metadata))


def _join(address: str, show_workers: bool, job: JobConfig) -> None:
    try:
        with _keeping_sigterm(), run_environment():
            context = ray.init(
                address=address,
                job_config=job,
                log_to_driver=show_workers,
                logging_level=logging.WARNING,
            )
    except (
        Exception
    ) as error:  # Ray passes on any error, often as a plain Exception
        raise ClusterError(_not_joined(address, error)) from error
    _tell_dashboard(context.dashboard_url, logger)


def _start_embedded(show_workers: bool) -> None:
    """Start a cluster that ends with this process.

    When the cluster ends, the environment variables that Ray has set are
    removed.
    """
    with contextlib.ExitStack() as started:
        started.enter_context(_environment_as_before())
        directory = started.enter_context(_own_token())
        _init_embedded(show_workers)
        started.callback(own_cluster.clear)
        own_cluster.set()
        session = own_node().get_session_dir_path()
        started.callback(_reaper.start(session, directory))
        started.callback(ray.shutdown)
        _show_dashboard_later(started, logger, cluster_environment)
        _embedded.push(started.pop_all())
    atexit.register(disconnect)


def _init_embedded(show_workers: bool) -> None:
    # Ray warns that it uses a token by default; `_tell_dashboard` says where
    # the token is.
    logging.getLogger(TOKEN_LOGGER).setLevel(logging.ERROR)
    before = keep_on_loopback(True)
    try:
        # The cluster's processes inherit the environment.
        with (
            _keeping_sigterm(),
            cluster_environment(),
            without_extras(show_workers),
        ):
            _init_patiently(show_workers)
    except Exception as error:  # as above
        where = f"its newest logs in {ray_directory()} say why; on a busy machine, try again"
        raise ClusterError(
            f"Ray did not start on this machine: {first_line(error)} ({where})"
        ) from error
    finally:
        keep_on_loopback(before)


def _init_patiently(show_workers: bool) -> None:
    """Start Ray; if Ray is too slow, try again.

    The processes of a failed start end with this process.
    """
    for attempt in range(1, _STARTS + 1):
        try:
            ray.init(
                address="local",
                log_to_driver=show_workers,
                logging_level=logging.WARNING,
            )
        except Exception as error:
            is_slow = "timed out during startup" in str(error)
            if not is_slow or attempt == _STARTS:
                raise
            words = "Ray did not start in its own time: attempt %d of %d"
            logger.warning(words, attempt + 1, _STARTS)
        else:
            return


@contextmanager
def started_as_ray() -> Iterator[None]:
    """Within the block, use Ray as the script started it, or start it without extras.

    A script that continues after the block gets the dashboard that Ray would
    have started: Ray Train's actors ask it which controllers are alive.
    """
    if ray.is_initialized():
        yield
        return
    with without_extras(show_workers=True):
        ray.init()
    if not own_node().is_head():
        yield
        return
    at_end = contextlib.ExitStack()
    atexit.register(at_end.close)
    log = logging.getLogger("ray")
    goes_on = _show_dashboard_later(at_end, log, contextlib.nullcontext)
    try:
        yield
    finally:
        goes_on.set()


def _show_dashboard_later(
    before_end: contextlib.ExitStack,
    log: logging.Logger,
    environment: Callable[[], contextlib.AbstractContextManager[None]],
) -> threading.Event:
    """Start an embedded cluster's dashboard later, if the cluster still exists.

    Args:
        before_end: A stack that is closed before the cluster ends.
        log: Receives the dashboard's address.
        environment: The environment that the dashboard inherits.

    Returns:
        An event. The dashboard starts one second after the event is set, and
        after about a minute if nobody sets the event.
    """
    is_due = threading.Event()
    is_over = threading.Event()
    node = own_node()

    def serve() -> None:
        is_due.wait(_DASHBOARD_AFTER_S)
        if is_over.wait(_SCRIPTS_END_S) or own_node() is not node:
            return
        try:
            with environment():
                address = start_dashboard()
            _tell_dashboard(address, log)
        except Exception:  # the script has ended its cluster meanwhile
            logger.debug("no dashboard was started", exc_info=True)
            return
        is_over.wait()  # the dashboard ends with this thread

    thread = threading.Thread(target=serve, name="dashboard", daemon=True)
    thread.start()
    before_end.callback(thread.join)
    before_end.callback(is_due.set)
    before_end.callback(is_over.set)
    return is_due


def _tell_dashboard(address: str | None, log: logging.Logger) -> None:
    if address:
        log.info("dashboard: http://%s%s", address, where_the_token_is())


@contextlib.contextmanager
def _environment_as_before() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            if name.startswith(("RAY_", "PYTHON")):
                del os.environ[name]


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """After the block, leave the cluster, unless it was joined before the block."""
    was_joined = ray.is_initialized()
    try:
        yield
    finally:
        if not was_joined:
            disconnect()


def disconnect() -> None:
    """Leave the cluster.

    An embedded cluster ends. Processes that do not answer within 20 s are
    killed: Ray would wait for them.
    """
    if not ray.is_initialized():
        return
    processes = [process for _, process in own_node().live_processes()]

    def kill() -> None:
        logger.warning("Ray's processes do not answer: they are killed")
        for process in processes:
            process.kill()

    impatient = threading.Timer(_LEAVE_S, kill)
    impatient.start()
    try:
        # Ray ends the process if another thread frees one of Ray's objects
        # meanwhile, which garbage collection may do in any thread.
        with without_collection(), _keeping_sigterm(until_over=True):
            _embedded.close()
            ray.shutdown()  # if a cluster was joined
    finally:
        impatient.cancel()


def _not_joined(address: str, error: Exception) -> str:
    rule = "RAY_ADDRESS must name the head of a running cluster, as host:6379; if it is unset, a cluster starts on this machine"
    if isinstance(error, AuthenticationError):
        rule = "the cluster asks for a token: set RAY_AUTH_MODE=token, with the token in ~/.ray/auth_token"
    elif has_token() and not asks_for_token():
        # Ray says no more than that it could not connect.
        rule += (
            "; to a cluster that asks for your token, set RAY_AUTH_MODE=token"
        )
    return f"Ray could not be joined at RAY_ADDRESS {address}: {first_line(error)} ({rule})"


@contextlib.contextmanager
def _keeping_sigterm(until_over: bool = False) -> Iterator[None]:
    """Restore the handler of SIGTERM after the block.

    Ray replaces the handler when it starts. When Ray ends, it restores the
    system's default, which ends the process although Python still reports a
    handler.

    With `until_over`, a SIGTERM that a thread of this process sends meanwhile,
    such as for a lost lease, is held back. Do not use it while Ray starts:
    Ray's processes would inherit the blocked signal.
    """
    before = signal.getsignal(signal.SIGTERM)
    blocked = signal.pthread_sigmask(
        signal.SIG_BLOCK, [signal.SIGTERM] if until_over else []
    )
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def check_cluster(spec: RunSpec | FunctionSpec) -> str:
    """Connect; return the device type of the run's workers.

    Raises:
        ConfigError: the cluster can never be large enough for the workers.
    """
    connect()
    scaling = spec.config.scaling
    most = capacity()
    gpu = wants_gpu(spec.config, most)
    for resource, each in _resources(scaling, gpu).items():
        has = most.get(resource, 0.0)
        fits = math.floor(has / each)
        if fits < scaling.min_workers:
            workers = scaling.num_workers
            rule = f"must fit on the cluster, which can grow to {counted(has, resource, 'g')} (each worker takes {each:g})"
            fix = f"add nodes with a {resource}"
            if fits:
                fix = f"set it to at most {fits}"
            raise ConfigError(
                "scaling.num_workers", workers, rule, fix, spec.source
            )
    return "cuda" if gpu else "cpu"


def wants_gpu(config: TrainConfig | FunctionConfig, most: Resources) -> bool:
    """Return whether workers get GPUs; for auto, if the cluster has or may get any."""
    use_gpu = config.scaling.use_gpu
    if use_gpu == "auto":
        may = isinstance(config, FunctionConfig) or config.device in (
            "auto",
            "cuda",
        )
        return may and most.get("GPU", 0.0) > 0
    return use_gpu


def ray_scaling(scaling: ScalingConfig, gpu: bool) -> Any:
    """Convert our scaling section to Ray Train's."""
    import ray.train  # imported here: it takes a second

    workers = scaling.num_workers
    return ray.train.ScalingConfig(
        num_workers=workers
        if isinstance(workers, int)
        else (workers[0], workers[1]),  # type: ignore[arg-type]
        use_gpu=gpu,
        resources_per_worker=_resources(scaling, gpu),
        placement_strategy=scaling.placement_strategy,
        label_selector=scaling.label_selector or None,  # type: ignore[call-arg]
    )


def _resources(scaling: ScalingConfig, gpu: bool) -> Resources:
    """Return the resources that one worker reserves."""
    each = {"CPU": float(scaling.cpus_per_worker)}
    if gpu:
        each["GPU"] = scaling.gpus_per_worker
    return each


@contextlib.contextmanager
def _own_token() -> Iterator[Path | None]:
    """Give a new embedded cluster a temporary token that only this user can read.

    Since 2.59 Ray protects every cluster that `ray.init()` starts by a token,
    and writes one to ~/.ray/auth_token if the user has none. From then on `ray
    start` requires it too, and scripts that worked before fail. A token or a
    mode that the user has chosen is left alone. Yields the token's directory,
    or None.
    """
    if "RAY_AUTH_MODE" in os.environ:
        yield None
        return
    directory = None
    if not has_token():
        # mkdtemp gives it mode 0700.
        directory = Path(tempfile.mkdtemp(prefix="paceline-token-"))
        file = directory / "token"
        file.write_text(new_token())
        os.environ[_TOKEN_PATH] = str(file)
    os.environ["RAY_AUTH_MODE"] = "token"
    read_token_again()
    try:
        yield directory
    finally:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
            os.environ.pop(_TOKEN_PATH, None)
        os.environ.pop("RAY_AUTH_MODE", None)
        read_token_again()


def where_the_token_is() -> str:
    """Say where the dashboard's token is; empty if the dashboard needs no token."""
    if not asks_for_token():
        return ""
    if path := os.environ.get(_TOKEN_PATH):
        return f" (it asks for the token in {path})"
    return " (it asks for the token that `ray get-auth-token` prints)"

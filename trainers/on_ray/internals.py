"""The parts of Ray beyond its public API that trainers and cluster use (Ray).

The only other such file is tune/ray_internals.py; a test checks that. Names
that every supported version of Ray has are imported at the top, so a version
without them fails at the start, not in the middle of a run, and names what is
missing. `make ray-contract` tests the oldest and the newest supported version.
Names that a run can do without are looked up in functions, which say what
happens without them. Ray Train and the autoscaler are imported in functions: a
node's watchers need neither.
"""

import contextlib
import importlib
import inspect
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import ray
import ray._private.state
import ray._private.worker
from ray._common.utils import get_default_ray_temp_dir as ray_directory
from ray._private import ray_constants
from ray._private.authentication.authentication_token_generator import (
    generate_new_authentication_token as new_token,
)
from ray._private.node import Node
from ray._raylet import (  # type: ignore[attr-defined] # compiled
    AuthenticationMode,
    AuthenticationTokenLoader,
    Config,
    GcsClient,
    get_authentication_mode,
)
from ray.exceptions import AuthenticationError
from ray.experimental.internal_kv import _internal_kv_del as kv_delete
from ray.experimental.internal_kv import _internal_kv_exists as kv_exists
from ray.experimental.internal_kv import _internal_kv_get as kv_get
from ray.experimental.internal_kv import _internal_kv_list as kv_list
from ray.experimental.internal_kv import _internal_kv_put as kv_put

from trainers.errors import MISSING, ConfigError

if TYPE_CHECKING:
    from ray.train.v2._internal.execution.callback import ControllerCallback

logger = logging.getLogger(__name__)

__all__ = [
    # is told of the controller's start and states; the public UserCallback
    # is told only of reports and failures
    "ControllerCallback",
    "kv_delete",  # the store lasts as long as the cluster, and needs no actor
    "kv_exists",
    "kv_get",
    "kv_list",
    "kv_put",
    "new_token",  # for an embedded cluster
    "ray_directory",  # named in an error
]


def __getattr__(name: str) -> Any:
    if name == "ControllerCallback":
        return importlib.import_module(
            "ray.train.v2._internal.execution.callback"
        ).ControllerCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def accepted(call: Callable[..., Any], **given: Any) -> dict[str, Any]:
    """Return those of the arguments that `call` accepts in this version of Ray."""
    known = inspect.signature(call).parameters
    return {name: value for name, value in given.items() if name in known}


# The processes of a cluster and of its nodes. Ray's public API starts and ends
# them, but does not report their state.


def own_node() -> Any:
    """Return the node that this process has started or joined; None otherwise.

    The node knows Ray's processes.
    """
    return ray._private.worker._global_node


def own_node_is_alive(timeout_s: float) -> bool:
    """Ask the GCS whether it considers this process's node alive.

    Raises:
        RayError: The GCS does not answer.
    """
    worker: Any = ray._private.worker.global_worker
    gcs = worker.gcs_client
    [is_alive] = gcs.check_alive([worker.current_node_id], timeout=timeout_s)
    return bool(is_alive)


def actor_record(actor_id: str) -> dict[str, Any]:
    """Return what the GCS knows of an actor, such as State and Pid.

    The public `ray.util.state` needs the dashboard.
    """
    return dict(ray._private.state.actors(actor_id))


def keep_on_loopback(wanted: bool) -> bool:
    """Make clusters started from now on listen on the loopback only, or undo that.

    Their ports for metrics are included, as Ray does by itself on macOS and
    Windows. Returns the previous setting.
    """
    before = not ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = not wanted
    return before


@contextlib.contextmanager
def without_extras(show_workers: bool) -> Iterator[None]:
    """Let clusters that start within the block have no dashboard and no autoscaler.

    If `show_workers` is false, these clusters also lack the process that
    forwards workers' output.

    Ray's public option starts a server without pages instead of the dashboard,
    and waits for that server, too.
    """
    extras = ["start_api_server", "start_monitor"]
    if not show_workers:
        extras.append("start_log_monitor")
    kept = {}
    for name in extras:
        kept[name] = getattr(Node, name)
        setattr(Node, name, lambda *_given, **_named: None)
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(Node, name, method)


def start_dashboard() -> str | None:
    """Start the dashboard of a cluster without one; return its address.

    Ray ends the dashboard's process when the calling thread ends.
    """
    node = own_node()
    node.start_api_server(include_dashboard=None, raise_on_failure=False)
    address: str | None = node.webui_url
    return address


def drain_node(
    gcs_address: str,
    node_id: str,
    reason: str,
    deadline_ms: int,
    timeout_s: float,
) -> tuple[bool, str]:
    """Ask Ray to drain a node before its spot machine is taken away.

    Returns whether Ray accepts, and if not, why.

    Ray's command for draining is undocumented, and reports neither.
    """
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined] # compiled

    kind = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    client = GcsClient(address=gcs_address)
    accepted, words = client.drain_node(
        node_id, kind, reason, deadline_ms, timeout=timeout_s
    )
    return bool(accepted), str(words)


# The token. The public way is an environment variable, which Ray reads once.


def has_token() -> bool:
    """Whether the user has a token.

    Raises ConfigError if RAY_AUTH_TOKEN_PATH names no file with a token.
    """
    loader = AuthenticationTokenLoader.instance()
    try:
        return bool(loader.has_token(ignore_auth_mode=True))
    except AuthenticationError as error:
        raise ConfigError(
            "RAY_AUTH_TOKEN_PATH",
            os.environ.get("RAY_AUTH_TOKEN_PATH", MISSING),
            "must name a file that holds a token",
            "write one to ~/.ray/auth_token with `ray get-auth-token --generate`, or unset the variable",
        ) from error


def read_token_again() -> None:
    """Make Ray read the mode and the token from the environment again."""
    AuthenticationTokenLoader.instance().reset_cache()
    Config.initialize("")


def asks_for_token() -> bool:
    """Whether clusters of this process require a token."""
    return bool(get_authentication_mode() == AuthenticationMode.TOKEN)


# The autoscaler. Its files are public, but the calls that read or check these
# files are not.


def kuberay_config(namespace: str, cluster: str) -> Mapping[str, Any]:
    """Read a RayCluster resource from Kubernetes, with the pod's account.

    Ray's autoscaler on the head does the same.

    Raises ValueError if this version of Ray cannot read it: then it is unknown
    how far the cluster may grow.
    """
    try:
        from ray.autoscaler._private.kuberay.autoscaling_config import (
            _derive_autoscaling_config_from_ray_cr as derive,
        )
        from ray.autoscaler._private.kuberay.node_provider import (
            KubernetesHttpApiClient,
        )
    except ImportError as error:
        raise ValueError(str(error)) from None
    config: Mapping[str, Any] = derive(
        KubernetesHttpApiClient(namespace).get(f"rayclusters/{cluster}")
    )
    return config


def check_cluster_file(config: dict[str, Any]) -> None:
    """Raise Ray's error if a file of `ray up` does not fit its schema."""
    from ray.autoscaler._private.util import validate_config

    validate_config(config)


def filled_in(config: dict[str, Any]) -> dict[str, Any]:
    """Return a file of `ray up` completed with Ray's defaults."""
    from ray.autoscaler._private.util import prepare_config

    prepared: dict[str, Any] = prepare_config(config)
    return prepared


def autoscaler_parts() -> tuple[Any, Any, int]:
    """Return parts of Ray's autoscaler that handle a machine refused by a cloud.

    They are the classes Reconciler and CloudResourceMonitor, and the state of
    such a machine.
    """
    from ray.autoscaler.v2.instance_manager.reconciler import Reconciler
    from ray.autoscaler.v2.instance_manager.subscribers.cloud_resource_monitor import (
        CloudResourceMonitor,
    )
    from ray.core.generated.instance_manager_pb2 import Instance  # type: ignore[attr-defined] # compiled

    return Reconciler, CloudResourceMonitor, int(Instance.ALLOCATION_FAILED)


# Ray Train's controller.


def controller_logging(quiet: bool) -> dict[str, Any]:
    """Return the RunConfig's options for what a run's controller logs.

    If `quiet`, the controller logs only warnings. Otherwise, or if this Ray
    has no such option, Ray's default applies.
    """
    import ray.train

    kind = getattr(ray.train, "LoggingConfig", None)
    if not quiet or kind is None:
        return {}
    return {"logging_config": kind(log_level="WARNING")}


def without_cleaner(callbacks: list[Any], *others: type) -> list[Any]:
    """Return a trainer's callbacks without those that free what a dead controller had.

    Their actor asks the dashboard whether the controller is alive. Without a
    dashboard, or with two clusters on a machine, that actor does not end with
    the run, or ends with an error. Callbacks of the classes `others` are left
    out, too.
    """
    from ray.train.v2._internal.callbacks.placement_group_callback import (
        PlacementGroupCleanerCallback as Cleaner,
    )

    return [
        callback
        for callback in callbacks
        if not isinstance(callback, (Cleaner, *others))
    ]


def starts_again(state: Any) -> bool:
    """Whether the controller is in a state just before a new worker group."""
    from ray.train.v2._internal.execution.controller.state import (
        ReschedulingState,
        RestartingState,
    )

    return isinstance(state, ReschedulingState | RestartingState)


def is_leaving() -> bool:
    """Whether a node of this worker's group is about to be taken away.

    All ranks must call it equally often.

    Ray reports this from version 2.58 on. With an older Ray the answer is
    always False, and the loss of a node is a failure like any other.
    """
    import ray.train

    ask = getattr(ray.train, "get_preemption_info", None)
    return ask is not None and ask() is not None


def nodes_taken(before: Any, state: Any) -> set[str]:
    """Return the nodes whose preemption makes a group start again.

    Empty if Ray is older than 2.58, which does not learn of preemptions.
    """
    try:
        from ray.train.v2._internal.execution.controller.state import (
            PreemptingState,
            RestartingState,
        )
    except ImportError:
        return set()
    if not (
        isinstance(before, PreemptingState)
        and isinstance(state, RestartingState)
    ):
        return set()
    return set(before.preemption_info.preempted_node_ids)


def coordinator() -> Any:
    """Return the actor that counts nodes for elastic groups."""
    from ray.data._internal.cluster_autoscaler import (
        default_autoscaling_coordinator,
    )

    return (
        default_autoscaling_coordinator.get_or_create_autoscaling_coordinator()
    )


def run_register() -> Any:
    """Return the actor that records the cluster's runs; None if there were none."""
    from ray.train.v2._internal.state.state_actor import get_state_actor

    return get_state_actor()


def tell_of_job(words: Mapping[str, str]) -> None:
    """Add `words` to the metadata of the submitted job to which this process belongs.

    `ray job list` and the job's page in the dashboard show them. Does nothing
    outside such a job, or if this version of Ray stores metadata elsewhere.

    Ray's public API sets metadata only when a job is submitted.
    """
    try:
        given = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])[
            "metadata"
        ]
        key = f"_ray_internal_job_info_{given['job_submission_id']}".encode()
        job = json.loads(kv_get(key, namespace=b"job"))
        job["metadata"] = {**(job["metadata"] or {}), **words}
        kv_put(key, json.dumps(job).encode(), namespace=b"job")
    except Exception:  # no error here may end a sweep
        logger.debug("the job's metadata stays as it is", exc_info=True)


# Loggers, named after their modules. Under a version of Ray that renames one,
# more is logged than we want, and nothing breaks.
_TRAIN = "ray.train.v2._internal"
TOKEN_LOGGER = "ray._private.authentication.authentication_token_setup"  # noqa: S105 # (a name)
FAILURE_LOGGER = f"{_TRAIN}.execution.failure_handling.default"
CONTROLLER_LOGGER = f"{_TRAIN}.execution.controller.controller"
STATE_LOGGER = f"{_TRAIN}.callbacks.state_manager"
COORDINATOR_LOGGER = (
    f"{_TRAIN}.execution.scaling_policy.autoscaling_coordinator_client"
)


def quiet_reports() -> None:
    """Suppress Ray's log line for every report of every rank."""
    # The logger is named after the file of the module imported here.
    from ray.train.v2._internal.execution import (
        context,
    )

    logging.getLogger(str(context.__file__)).setLevel(logging.WARNING)


def quiet_failures() -> None:
    """Suppress Ray's traceback of what a training function raises."""
    logging.getLogger(f"{_TRAIN}.util").setLevel(logging.CRITICAL)

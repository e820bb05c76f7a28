"""(Ray) Read a `ray up` YAML through Ray's own schema and defaults, offline; every refusal is one sentence."""

import contextlib
import copy
import io
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster.files.cluster_file import ClusterFile, join, read_documents
from cluster.files.kuberay import is_kuberay, kuberay_files
from cluster.files.node_types import node_types
from cluster.files.shape import Shape, check_shape
from trainers.errors import MISSING, ConfigError, ConfigErrors, did_you_mean, first_line

_PROVIDERS = ("aws", "azure", "gcp", "local", "vsphere", "aliyun")
_SETUP_FIELDS = ("head_setup_commands", "worker_setup_commands")
_START_FIELDS = ("head_start_ray_commands", "worker_start_ray_commands")
_COMMAND_FIELDS = ("initialization_commands", "setup_commands", *_SETUP_FIELDS, *_START_FIELDS)
_HOW_TO_WRITE = "docs.ray.io lists the fields of a cluster YAML"
_MACHINE: Shape = {
    "InstanceType": "text",
    "InstanceMarketOptions": {"MarketType": "text"},
    "machineType": "text",
    "guestAccelerators": [{"acceleratorCount": "count"}],
    "scheduling": ({"preemptible": "scalar", "provisioningModel": "text", "onHostMaintenance": "text"},),
    "azure_arm_parameters": {"vmSize": "text", "priority": "text"},
}
_PERMISSION: Shape = {
    "FromPort": "scalar",
    "ToPort": "scalar",
    "IpRanges": [{"CidrIp": "text"}],
    "Ipv6Ranges": [{"CidrIpv6": "text"}],
}
_SHAPE: Shape = {
    "min_workers": "nodes",
    "max_workers": "nodes",
    "file_mounts": {"*": "text"},
    "provider": {"worker_ips": ["text"], "security_group": {"IpPermissions": [_PERMISSION]}},
    "docker": {"run_options": ["text"], "head_run_options": ["text"], "worker_run_options": ["text"]},
    "available_node_types": {
        "*": {"min_workers": "nodes", "max_workers": "nodes", "resources": {"*": "count"}, "node_config": _MACHINE}
    },
}
"""What Ray's schema leaves open, and is read here."""


def load_cluster(path: str | Path) -> ClusterFile:
    """Read and check a cluster file, the first cluster in it; needs neither network nor a cloud account.

    Raises ConfigError (or ConfigErrors) for everything that makes the file unusable.
    """
    return load_clusters(path)[0]


def load_clusters(path: str | Path) -> tuple[ClusterFile, ...]:
    """Read all clusters of a file: one of a `ray up` YAML, one of each RayCluster and RayJob of a KubeRay YAML."""
    source = str(path)
    documents = read_documents(Path(path), source)
    if is_kuberay(documents):
        return kuberay_files(documents, source)
    return (_ray_up(documents, source),)


def _ray_up(documents: list[Any], source: str) -> ClusterFile:
    from ray.autoscaler._private.util import prepare_config, validate_config

    written = documents[0] if documents else None
    if len(documents) > 1:
        raise ConfigError("the file", MISSING, "must be one document for `ray up`", "remove the `---` in it", source)
    if not isinstance(written, dict):
        raise ConfigError("the file", written, "must be a mapping of fields to values", _HOW_TO_WRITE, source)
    if "provider" not in written and {"run", "commands"} & written.keys():
        rule, fix = "is a task of SkyPilot's or dstack's", "ask `sky launch --dryrun FILE`, or `dstack apply -f FILE`"
        raise ConfigError("the file", MISSING, rule, fix, source)
    _check_schema(written, source)
    check_shape(written, _SHAPE, "", _HOW_TO_WRITE, source)
    _check_provider(written, source)
    with _asking_ray(written, source):
        config = prepare_config(copy.deepcopy(written))
    _check_counts(written, config, source)
    with _asking_ray(written, source):
        validate_config(config)
    check_shape(config, _SHAPE, "", _HOW_TO_WRITE, source)  # with the node types that Ray makes of legacy fields
    provider, commands = config["provider"], _commands(written, config)
    return ClusterFile(
        source=source,
        name=config["cluster_name"],
        provider=provider["type"],
        region=provider.get("region") or provider.get("location"),
        max_workers=config["max_workers"],
        node_types=node_types(config, commands),
        written=written,
        config=config,
        commands=commands,
    )


def _check_schema(written: dict[str, Any], source: str) -> None:
    """What the file itself says, by Ray's schema: before the defaults, which crash on a wrong type."""
    from ray.autoscaler._private.util import validate_config

    shape = {"cluster_name": "default", "cluster_synced_files": [], "max_workers": 2**31, **written}
    for legacy in ("min_workers", "head_node", "worker_nodes"):  # Ray takes these out before it validates
        if legacy == "min_workers" or not shape.get(legacy):
            shape.pop(legacy, None)
    try:
        validate_config(shape)
    except ValueError:
        return  # about head_node_type and sums, which `_check_counts` says in more words
    except Exception as error:
        raise _schema_error(error, source) from error


def _schema_error(error: Any, source: str) -> ConfigError:
    """A jsonschema.ValidationError as a sentence (read by attribute: its package has no types)."""
    field = ".".join(str(part) for part in error.absolute_path)
    if error.validator == "additionalProperties":
        known = sorted(error.schema["properties"])
        unknown = next(key for key in error.instance if key not in known)
        fix = did_you_mean(unknown, known, f"the fields here are {', '.join(known)}")
        return ConfigError(join(field, unknown), error.instance[unknown], "is no such field", fix, source)
    if error.validator == "required":
        missing = next(key for key in error.validator_value if key not in error.instance)
        return ConfigError(join(field, missing), MISSING, "is required", f"add `{missing}`", source)
    rules = {
        "type": f"must be of the type {error.validator_value}",
        "minimum": f"must be at least {error.validator_value}",
        "enum": f"must be one of {error.validator_value}",
    }
    rule = rules.get(error.validator, f"breaks Ray's schema ({error.message[-160:]})")
    return ConfigError(field or "the file", error.instance, rule, _HOW_TO_WRITE, source)


def _check_provider(written: Mapping[str, Any], source: str) -> None:
    """What is for kubectl, and what Ray would print and exit for with provider `local`."""
    provider = written["provider"]
    if provider["type"] == "kuberay":
        fix = "write a RayCluster, as in cluster/kuberay.yaml, for kubectl"
        raise ConfigError("provider.type", "kuberay", "is not for `ray up`", fix, source)
    if provider["type"] != "local":
        return
    if "available_node_types" in written:
        rule = "has no effect with provider local"
        raise ConfigError("available_node_types", MISSING, rule, "remove it; Ray asks the hosts", source)
    needed = ("max_workers",) if "coordinator_address" in provider else ("provider.head_ip", "provider.worker_ips")
    for field in needed:
        key = field.rsplit(".", 1)[-1]
        if key not in provider and key not in written:
            raise ConfigError(field, MISSING, "is required by provider local", f"add `{key}`", source)


def _check_counts(written: Mapping[str, Any], config: Mapping[str, Any], source: str) -> None:
    """The head node type and the numbers of workers, all problems at once."""
    errors: list[ConfigError] = []

    def refuse(field: str, value: Any, rule: str, fix: str) -> None:
        errors.append(ConfigError(field, value, rule, fix, source))

    types: Mapping[str, Any] = config["available_node_types"]
    head, limit = config["head_node_type"], config["max_workers"]
    if "available_node_types" in written and "head_node_type" not in written:
        fix = f"add `head_node_type: {next(iter(types), 'NAME')}`"
        refuse("head_node_type", MISSING, "is required with available_node_types", fix)
    elif head not in types:
        fix = did_you_mean(head, types, f"name one of {', '.join(types)}")
        refuse("head_node_type", head, "must be one of available_node_types", fix)

    is_local = config["provider"]["type"] == "local"  # one type, which Ray makes of the top-level fields
    for name, node_type in types.items():
        prefix = "" if is_local else f"available_node_types.{name}."
        low, high = node_type["min_workers"], node_type["max_workers"]
        if low < 0:
            refuse(f"{prefix}min_workers", low, "must be at least 0", "write 0")
        elif high < low:
            rule = f"must be at most its max_workers, {high}"
            refuse(f"{prefix}min_workers", low, rule, f"write {high} or less, or raise its max_workers")
        if high > limit:
            rule = f"must be at most the cluster's max_workers, {limit}"
            refuse(f"{prefix}max_workers", high, rule, f"write {limit}, or raise max_workers at the top")
    always = sum(node_type["min_workers"] for node_type in types.values())
    if always > limit and not is_local:
        rule = f"must be at least the sum of all min_workers, {always}"
        refuse("max_workers", limit, rule, f"write {always} or more")
    if errors:
        raise errors[0] if len(errors) == 1 else ConfigErrors(errors)


def _commands(written: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Commands by the field they stand in; Ray puts setup_commands before those of head and workers."""
    shared = len(config["setup_commands"])
    defaults = {field: config[field][shared * (field in _SETUP_FIELDS) :] for field in _COMMAND_FIELDS}
    return {field: tuple(written.get(field, defaults[field])) for field in _COMMAND_FIELDS}


@contextlib.contextmanager
def _asking_ray(written: Mapping[str, Any], source: str) -> Iterator[None]:
    """Make a ConfigError of what Ray refuses, and keep its remarks off the terminal: what matters is a finding."""
    logger = logging.getLogger("ray.autoscaler")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    except NotImplementedError as error:  # a provider that Ray does not know
        rule = f"must be one of {', '.join(_PROVIDERS)}"
        raise ConfigError("provider.type", written["provider"]["type"], rule, "correct it", source) from error
    except Exception as error:
        rule = f"is refused by Ray ({first_line(error)})"
        raise ConfigError("the file", MISSING, rule, _HOW_TO_WRITE, source) from error
    finally:
        logger.setLevel(level)

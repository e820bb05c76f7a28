"""What Kubernetes and KubeRay accept in a RayCluster or RayJob, and what would be unsafe, contradictory or lost."""

from collections.abc import Iterator, Mapping
from typing import Any

from cluster.files.cluster_file import ClusterFile
from cluster.files.kuberay import ENV, GPU, container_of, groups_of, pod_of, prefix_of, resources_of
from cluster.finding import Finding, error, warning
from cluster.rules import common
from trainers.errors import MISSING

_QUEUE = "kueue.x-k8s.io/queue-name"


def kuberay_findings(cluster: ClusterFile) -> list[Finding]:
    """Return all remarks on one document."""
    prefix = prefix_of(cluster.written)
    groups = groups_of(cluster.config, prefix)
    by_operator = (cluster.config.get("authOptions") or {}).get("mode") == "token"
    starts = {f"{field}.{ENV}": _environment(group, by_operator) for field, group in groups.items()}
    found = [*_document(cluster, prefix), *common.environment_findings(starts)]
    for field, group in groups.items():
        found += common.image_finding(f"{field}.template.spec.containers.0.image", container_of(group).get("image"))
    head, *workers = groups.items()
    found += _head(*head)
    for field, group in workers:
        found += _worker(field, group)
    return [*found, *common.reaction_findings(*next(iter(starts.items())))]


def _environment(group: Mapping[str, Any], by_operator: bool) -> dict[str, str]:
    """The variables of a group's Ray container; `$NAME` for what comes from elsewhere, a Secret or so."""
    found = {"RAY_AUTH_MODE": "token"} if by_operator else {}
    for entry in container_of(group).get("env") or ():
        value = entry.get("value")
        found[entry["name"]] = f"${entry['name']}" if value is None else str(value)
    return found


def _document(cluster: ClusterFile, prefix: str) -> Iterator[Finding]:
    spec, config = cluster.written["spec"], cluster.config
    queue = (cluster.written["metadata"].get("labels") or {}).get(_QUEUE)
    if cluster.written["kind"] == "RayJob" and not spec.get("shutdownAfterJobFinishes"):
        rule = "must be true, or the cluster and its GPUs are paid for after the job"
        yield warning("spec.shutdownAfterJobFinishes", MISSING, rule, "write `shutdownAfterJobFinishes: true`")
    if spec.get("suspend") and queue is None:
        rule = "waits for ever: without a queue nobody sets it to false"
        yield warning("spec.suspend", True, rule, f"add the label `{_QUEUE}`, or remove it where there is no Kueue")
    version = config.get("rayVersion")
    if version:
        yield from common.version_finding(f"{prefix}.rayVersion", "ray", str(version))
    else:
        rule = "is required: without it KubeRay leaves out authentication and the autoscaler's version"
        yield error(f"{prefix}.rayVersion", MISSING, rule, f"write {common.expected_versions().get('ray')}")
    grows = config.get("enableInTreeAutoscaling") is True
    if not grows and queue is None:  # Kueue admits a size
        rule = "must be true, or the number of pods stays as it is: none is started for a waiting trial"
        fix = "write `enableInTreeAutoscaling: true`"
        yield warning(f"{prefix}.enableInTreeAutoscaling", MISSING, rule, fix)
    if grows and (config.get("autoscalerOptions") or {}).get("version") == "v2":
        for field, group in groups_of(config, prefix).items():
            policy = pod_of(group).get("restartPolicy", MISSING)
            if policy != "Never":
                rule = "must be Never with autoscaler v2: a restarted pod would be two Ray nodes of one name"
                yield error(f"{field}.template.spec.restartPolicy", policy, rule, "write Never")


def _head(field: str, group: Mapping[str, Any]) -> Iterator[Finding]:
    fix = "write `serviceType: ClusterIP`, no ingress, and use `kubectl port-forward`"
    kind = group.get("serviceType")
    if kind in ("LoadBalancer", "NodePort"):
        yield error(f"{field}.serviceType", kind, common.OPEN_PORT, fix)
    if group.get("enableIngress"):
        yield error(f"{field}.enableIngress", True, common.OPEN_PORT, fix)
    told_cpus, _ = resources_of(group, "CPU", "cpu")
    told_gpus, gpus = resources_of(group, "GPU", GPU)
    if told_cpus != 0 or (gpus if told_gpus is None else told_gpus):
        start = dict(group.get("rayStartParams") or {})
        yield warning(f"{field}.rayStartParams", start, common.HEAD_WORKS, 'write `num-cpus: "0"` and `num-gpus: "0"`')


def _worker(field: str, group: Mapping[str, Any]) -> Iterator[Finding]:
    told, limit = resources_of(group, "GPU", GPU)
    if told is not None and told != limit:
        rule = f"must be the container's limit of {GPU}, {limit:g}"
        yield error(f"{field}.rayStartParams.num-gpus", told, rule, f'write "{limit:g}"')
    tolerated = {entry.get("key") for entry in pod_of(group).get("tolerations") or ()}
    # A toleration without a key tolerates everything.
    if limit and not tolerated & {GPU, None}:
        rule = f"must tolerate {GPU}, the taint of GPU nodes, or no pod is ever placed"
        fix = f"add `{{key: {GPU}, operator: Exists, effect: NoSchedule}}`"
        yield warning(f"{field}.template.spec.tolerations", MISSING, rule, fix)

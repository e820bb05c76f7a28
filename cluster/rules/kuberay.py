"""What Kubernetes and KubeRay accept in a RayCluster or RayJob, and what would be unsafe, contradictory or lost."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.files.cluster_file import ClusterFile
from cluster.files.kuberay import ENV, GPU, container_of, groups_of, limits_of, pod_of, quantity
from cluster.finding import Finding, error, warning
from cluster.rules.head import kuberay_head_findings
from cluster.rules.sentences import DIFFERS, HEAD_WORKS, HEAD_WORKS_FIX, OPEN_PORT, SECRET
from cluster.rules.timeouts import reaction_findings
from cluster.rules.versions import expected_versions, same_version
from trainers.errors import MISSING

_RAY_IN_IMAGE = re.compile(r"(?:rayproject/ray(?:-ml|-llm)?:|ray[-_]?)(\d+\.\d+\.\d+)")
_QUEUE = "kueue.x-k8s.io/queue-name"
_ELASTIC = "kueue.x-k8s.io/elastic-job"

Groups = Mapping[str, Mapping[str, Any]]
"""The head group and the worker groups, by their path in the document."""


def kuberay_findings(cluster: ClusterFile) -> list[Finding]:
    """Return all remarks on one document."""
    prefix = "spec.rayClusterSpec" if cluster.written["kind"] == "RayJob" else "spec"
    groups = {f"{prefix}.{path}": group for path, group in groups_of(cluster.config).items()}
    head = f"{prefix}.headGroupSpec"
    return [
        *_job(cluster),
        *_queued(cluster, prefix),
        *_version(cluster, prefix),
        *_token(cluster, prefix, groups),
        *_autoscaler(cluster, prefix, groups),
        *_open(groups[head], head),
        *(finding for field, group in groups.items() for finding in _image(field, group)),
        *(finding for field, group in groups.items() for finding in _gpus(field, group, field == head)),
        *_storage(groups),
        *kuberay_head_findings(cluster, groups),
        *reaction_findings(f"{head}.{ENV}", _environment(groups[head]).get),
    ]


def _job(cluster: ClusterFile) -> Iterator[Finding]:
    if cluster.written["kind"] == "RayJob" and not cluster.written["spec"].get("shutdownAfterJobFinishes"):
        if _queue(cluster):
            rule, level = "must be true, or Kueue refuses the job: its cluster would keep the quota", error
        else:
            rule, level = "must be true, or the cluster and its GPUs are paid for after the job", warning
        yield level("spec.shutdownAfterJobFinishes", MISSING, rule, "write `shutdownAfterJobFinishes: true`")


def _queued(cluster: ClusterFile, prefix: str) -> Iterator[Finding]:
    """What Kueue's webhook refuses (pkg/controller/jobs/rayjob of Kueue), and what waits without it for ever."""
    queue, spec = _queue(cluster), cluster.written["spec"]
    if spec.get("suspend") and queue is None:
        rule = "waits for ever: without a queue nobody sets it to false"
        yield warning("spec.suspend", True, rule, f"add the label `{_QUEUE}`, or remove it where there is no Kueue")
    if queue is None:
        return
    if not queue:
        yield error(f"metadata.labels.{_QUEUE}", queue, "must name a LocalQueue of the namespace", "write its name")
    annotations = cluster.written["metadata"].get("annotations") or {}
    if cluster.config.get("enableInTreeAutoscaling") and annotations.get(_ELASTIC) != "true":
        rule = "is refused by Kueue, which admits a size: that of `replicas`"
        fix = f'remove it and write `replicas`, or annotate with `{_ELASTIC}: "true"` where Kueue has that feature'
        yield error(f"{prefix}.enableInTreeAutoscaling", True, rule, fix)
    if spec.get("clusterSelector"):
        rule = "is refused by Kueue together with a queue: the quota is for a cluster of the job's own"
        yield error("spec.clusterSelector", MISSING, rule, "remove it")


def _queue(cluster: ClusterFile) -> str | None:
    """The LocalQueue of Kueue's that a document is for; None without one."""
    labels: Mapping[str, str] = cluster.written["metadata"].get("labels") or {}
    return labels.get(_QUEUE)


def _version(cluster: ClusterFile, prefix: str) -> Iterator[Finding]:
    right, said = expected_versions().get("ray"), cluster.config.get("rayVersion")
    if not said:
        rule = "is required: without it KubeRay leaves out authentication and the autoscaler's version"
        yield error(f"{prefix}.rayVersion", MISSING, rule, f"write {right}")
    elif right and not same_version(str(said), right):
        yield error(f"{prefix}.rayVersion", said, DIFFERS.format(right), f"write {right}")


def _token(cluster: ClusterFile, prefix: str, groups: Groups) -> Iterator[Finding]:
    by_operator = (cluster.config.get("authOptions") or {}).get("mode") == "token"
    for field, group in groups.items():
        entries = {entry.get("name"): entry for entry in container_of(group).get("env") or ()}
        by_hand = _environment(group).get("RAY_AUTH_MODE") == "token" and "RAY_AUTH_TOKEN" in entries
        if "value" in entries.get("RAY_AUTH_TOKEN", {}):
            fix = "take it from a Secret, by `valueFrom.secretKeyRef`"
            yield error(f"{field}.{ENV}.RAY_AUTH_TOKEN", MISSING, SECRET, fix)
        elif not (by_operator or by_hand):
            rule = "must turn token authentication on, or whoever reaches a pod runs code"
            yield error(f"{field}.{ENV}", MISSING, rule, f"write `authOptions: {{mode: token}}` in {prefix}")


def _autoscaler(cluster: ClusterFile, prefix: str, groups: Groups) -> Iterator[Finding]:
    if cluster.config.get("enableInTreeAutoscaling") is not True:
        if _queue(cluster):
            return
        rule = "must be true, or the number of pods stays as it is: none is started for a waiting trial"
        fix = "write `enableInTreeAutoscaling: true`"
        yield warning(f"{prefix}.enableInTreeAutoscaling", MISSING, rule, fix)
    elif (cluster.config.get("autoscalerOptions") or {}).get("version") == "v2":
        rule = "must be Never with autoscaler v2: a restarted pod would be two Ray nodes of one name"
        for field, group in groups.items():
            if (policy := pod_of(group).get("restartPolicy", MISSING)) != "Never":
                yield error(f"{field}.template.spec.restartPolicy", policy, rule, "write Never")


def _open(head: Mapping[str, Any], field: str) -> Iterator[Finding]:
    if (kind := head.get("serviceType")) in ("LoadBalancer", "NodePort"):
        fix = "write `serviceType: ClusterIP` and use `kubectl port-forward`"
        yield error(f"{field}.serviceType", kind, OPEN_PORT, fix)
    if head.get("enableIngress"):
        yield error(f"{field}.enableIngress", True, OPEN_PORT, "remove it, and use `kubectl port-forward`")


def _image(field: str, group: Mapping[str, Any]) -> Iterator[Finding]:
    where, image = f"{field}.template.spec.containers.0.image", container_of(group).get("image")
    right = expected_versions().get("ray")
    name, _, digest = (image or "").partition("@")
    tag = name.rpartition("/")[2].partition(":")[2]
    if image is None or not (tag or digest) or tag.startswith("latest"):
        rule = "must be pinned by a tag, or pods that start later differ"
        yield warning(where, image or MISSING, rule, "write a tag that names the versions in it")
    elif (version := _RAY_IN_IMAGE.search(image)) and right and not same_version(version[1], right):
        yield error(where, image, DIFFERS.format(right), f"build it from rayproject/ray:{right}-py312")


def _gpus(field: str, group: Mapping[str, Any], is_head: bool) -> Iterator[Finding]:
    start = group.get("rayStartParams") or {}
    limit = quantity(limits_of(group).get(GPU) or 0)
    told = start.get("num-gpus")
    said = limit if told is None else quantity(told)
    if is_head:
        cpus = start.get("num-cpus")
        if said or cpus is None or quantity(cpus):
            fix = f'write `num-cpus: "0"` and `num-gpus: "0"`, {HEAD_WORKS_FIX}'
            yield warning(f"{field}.rayStartParams", dict(start), HEAD_WORKS, fix)
        return
    if said != limit:
        rule = f"must be the container's limit of {GPU}, {limit:g}"
        yield error(f"{field}.rayStartParams.num-gpus", told, rule, f'write "{limit:g}"')
    tolerated = {entry.get("key") for entry in pod_of(group).get("tolerations") or ()}
    # A toleration without a key tolerates everything.
    if limit and not tolerated & {GPU, None}:
        rule = f"must tolerate {GPU}, the taint of GPU nodes, or no pod is ever placed"
        fix = f"add `{{key: {GPU}, operator: Exists, effect: NoSchedule}}`"
        yield warning(f"{field}.template.spec.tolerations", MISSING, rule, fix)


def _storage(groups: Groups) -> Iterator[Finding]:
    first = None
    for field, group in groups.items():
        value = _environment(group).get("PACELINE_STORAGE")
        first = first or value
        if not value:
            rule = "must set PACELINE_STORAGE, or checkpoints stay in one pod and die with it"
            fix = "add `{name: PACELINE_STORAGE, value: s3://BUCKET/PREFIX}`"
            yield warning(f"{field}.{ENV}", MISSING, rule, fix)
        elif value != first:
            rule, fix = f"differs from the first, {first}", "write the same place in all"
            yield error(f"{field}.{ENV}.PACELINE_STORAGE", value, rule, fix)


def _environment(group: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables of a group's Ray container that are written out."""
    entries = container_of(group).get("env") or ()
    return {
        entry["name"]: str(entry["value"]) for entry in entries if entry.get("name") and entry.get("value") is not None
    }

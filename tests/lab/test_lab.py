"""The user's day, for real: `ray up`, `cluster check`, jobs, the dashboard,
faults, `ray down`; and nothing is left.

Three hosts on one machine (tests/lab/hosts.py), a head and two workers. The
tests of this file build on each other: a host that has left in one of them
returns in the next, because each return takes half a minute.
"""

import importlib.metadata
import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from urllib.parse import urlencode

import pytest

from tests.lab.hosts import REPOSITORY, address_of, lab_of, logged_steps
from tests.lab.on_premises import DASHBOARD, HEAD, OnPremises
from tests.waits import until

pytestmark = [pytest.mark.full, pytest.mark.lab]

HOSTS = ["h0", "h1", "h2"]
PROMETHEUS = "http://127.0.0.1:9090"
DIGITS = (
    "python",
    "-m",
    "trainers",
    "examples/digits/train.yaml",
    "--launcher",
    "ray",
)
OWN = """
import time
from pathlib import Path
from examples.digits.task import Digits

class Unhurried(Digits):
    def transform(self, batch, training):
        if training:
            time.sleep(0.02)
        return super().transform(batch, training)

class Held(Digits):
    batches = 0

    def transform(self, batch, training):
        self.batches += training
        while self.batches > 100 and not Path(__file__).with_name("seen").exists():
            time.sleep(0.1)
        return super().transform(batch, training)
"""
"""Tasks of the user's own. `Unhurried`, for the run that loses its hosts,
leaves this machine's processors to all else. `Held` trains on once
Prometheus, which looks every ten seconds, has seen it.
"""
INTERVAL = 100
"""Steps between its checkpoints: three seconds or so."""
TOLD = 10
"""Steps between those that it tells of."""


@pytest.fixture(scope="module")
def lab():
    with lab_of(3) as lab:
        yield lab


@pytest.fixture(scope="module")
def cluster(lab):
    cluster = OnPremises(lab)
    cluster.up()
    if shutil.which("prometheus"):
        config = (
            f"--config.file={REPOSITORY}/cluster/monitoring/prometheus.yml"
        )
        where = (
            "--web.listen-address=127.0.0.1:9090",
            "--storage.tsdb.path=/tmp/prometheus",
        )
        lab.popen(
            HEAD,
            "prometheus",
            config,
            *where,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    return cluster


@pytest.fixture(scope="module")
def own(cluster):
    """The folder of the user's own tasks, on the storage that hosts share."""
    own = cluster.lab.shared / "own"
    own.mkdir()
    (own / "own.py").write_text(OWN)
    return own


@pytest.fixture(scope="module")
def elastic(cluster, own):
    """A run without end on one or two workers, a host each; it has both, and
    has written a checkpoint.
    """
    options = {
        "name": "elastic",
        "task": "own:Unhurried",
        "task_dir": "/srv/nfs/own",
        "max_steps": 100_000_000,
        "max_time_s": 600,
        "evaluate.every_steps": 100_000_000,
        "checkpoint.every_steps": INTERVAL,
        "log_every_steps": TOLD,
        "scaling.num_workers": [1, 2],
    }
    words = [
        str(word)
        for key, value in options.items()
        for word in (f"--{key}", value)
    ]
    job = cluster.submit(*DIGITS, *words, wait=False)
    until(lambda: "worker group of size 2" in cluster.log(job), "both workers")
    until(
        lambda: steps_of(cluster.log(job))[-1:] > [INTERVAL],
        "steps after a checkpoint",
    )
    return job


def check(cluster, *options):
    """(exit code, findings and verdicts) of `python -m cluster check`, typed
    on the head.
    """
    settings = (
        "RAY_AUTH_MODE=token",
        f"RAY_ADDRESS={address_of(HEAD)}:6379",
        "PACELINE_STORAGE=/srv/nfs/paceline",
    )
    command = (
        *settings,
        "python",
        "-m",
        "cluster",
        "check",
        "--json",
        *options,
    )
    done = cluster.lab.run(
        HEAD, "env", *command, check=False, cwd=str(REPOSITORY)
    )
    assert "{" in done.stdout, done.stdout
    report = json.loads(
        done.stdout[
            done.stdout.index("\n{") + 1 if done.stdout[0] != "{" else 0 :
        ]
    )
    return done.returncode, report


def named(report):
    """(host, field) of every error."""
    return {
        (found["host"], found["field"])
        for found in report["findings"]
        if found["level"] == "error"
    }


def steps_of(log):
    """The steps that a job's log tells of."""
    return [int(step) for step in re.findall(r"\bstep (\d+)/", log)]


def resumed_at(log):
    """The steps at which worker groups went on."""
    return [int(step) for step in re.findall(r"resumed at step (\d+) ", log)]


def asked(cluster, query):
    """The labels of every series that Prometheus finds for a query."""
    path = f"/api/v1/query?{urlencode({'query': query})}"
    status, body = cluster.fetch(path, token=False, name=HEAD, base=PROMETHEUS)
    assert status == 200, body
    return [found["metric"] for found in json.loads(body)["data"]["result"]]


def runs_of(cluster, metric):
    """The runs that Prometheus has a figure of Paceline's of."""
    query = f"ray_paceline_{metric}"
    return {found["run"] for found in asked(cluster, query)}


def test_every_node_is_in_order(cluster):
    until(lambda: cluster.alive() == HOSTS, "the workers")
    printed = cluster.submit("python", "-m", "cluster", "check")
    assert "3 of 3 nodes in order" in printed, printed


def test_a_job_trains_on_two_hosts(cluster):
    log = cluster.submit(
        *DIGITS, "--epochs", "6", "--scaling.num_workers", "2"
    )
    assert re.search(r"done: 138 steps, 6 epochs", log), log[-6000:]
    assert re.search(r"0\s+h[12]\s.*\n\s+1\s+h[12]\s", log), (
        "a rank on each host"
    )
    runs = {
        run["name"]: run["status"]
        for run in cluster.get("/api/train/v2/runs/v1")["train_runs"]
    }
    assert runs["digits"] == "FINISHED"


def test_the_dashboard_answers_on_the_loopback_alone_and_with_the_token_alone(
    cluster,
):
    for path in (
        "/api/version",
        "/api/jobs/",
        "/api/train/v2/runs/v1",
        "/api/v0/nodes",
    ):
        assert cluster.fetch(path, token=False)[0] in (401, 403), path
        assert cluster.fetch(path)[0] == 200, path
    wrong = cluster.type(
        "ray",
        "job",
        "list",
        "--address",
        DASHBOARD,
        check=False,
        RAY_AUTH_TOKEN="f" * 64,
    )
    assert (
        "Invalid authentication token" in wrong
        or "401" in wrong
        or "403" in wrong
    ), wrong
    for name in ("ctl", "h1", HEAD):
        status, reason = cluster.fetch(
            "/api/version", name=name, base=f"http://{address_of(HEAD)}:8265"
        )
        assert (status, "refused" in reason) == (0, True), name


def test_a_sweep_trains_in_two_lanes_and_prometheus_has_them(cluster, own):
    # bf16 takes minutes where it is emulated
    space = "{global_batch_size: [32, 64]}"
    task = ("--train.task", "own:Held", "--train.task_dir", "/srv/nfs/own")
    words = (
        "python",
        "-m",
        "tune",
        "examples/digits/sweep.yaml",
        "--space",
        space,
        *task,
    )
    size = ("--train.epochs", "6", "--lanes", "2")
    objective = ("--objective", "{metric: val_loss}")
    job = cluster.submit(*words, *size, *objective, wait=False)
    if shutil.which("prometheus"):
        lanes = {"digits-sweep/lane-0", "digits-sweep/lane-1"}
        until(lambda: lanes <= runs_of(cluster, "samples_per_s"), "two lanes")
        until(lambda: runs_of(cluster, "trials") == {"digits-sweep"}, "trials")
    (own / "seen").touch()
    until(lambda: cluster.job(job) not in ("PENDING", "RUNNING"), "its end")
    log = cluster.log(job)
    assert "2 trials in 2 lanes" in log
    assert len(re.findall(r"trial \d/2 .* done", log)) == 2, log[-6000:]
    assert (
        cluster.lab.shared / "paceline" / "digits-sweep" / "best.yaml"
    ).exists()


def test_check_names_another_torch_and_storage_that_is_not_shared(
    cluster,
):
    lab = cluster.lab
    metadata = next(
        file
        for file in importlib.metadata.files("torch") or []
        if file.name == "METADATA"
    ).locate()
    version = importlib.metadata.version("torch")
    text = (
        Path(str(metadata))
        .read_text(encoding="utf-8")
        .replace(f"Version: {version}", "Version: 2.14.1", 1)
    )
    (lab.home("h2") / "METADATA").write_text(text, encoding="utf-8")
    lab.run("h2", "mount", "--bind", "/root/METADATA", str(metadata))
    lab.run("h1", "mount", "-t", "tmpfs", "none", "/srv/nfs")
    try:
        code, report = check(cluster)
    finally:
        lab.run("h1", "umount", "/srv/nfs")
        lab.run("h2", "umount", str(metadata))
    assert code == 1
    assert named(report) == {("h2", "torch"), ("h1", "storage")}
    assert {node["host"]: node["verdict"] for node in report["nodes"]} == {
        "h0": "ok",
        "h1": "bad",
        "h2": "bad",
    }


def test_prometheus_has_every_node_and_the_run(cluster, elastic):
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (apt-get install prometheus)")
    instances = {
        found["instance"].partition(":")[0]
        for found in asked(cluster, "ray_node_cpu_utilization")
    }
    assert instances == {address_of(name) for name in cluster.lab.names}
    until(lambda: "elastic" in runs_of(cluster, "samples_per_s"), "the run")


def test_a_drained_host_loses_nothing(cluster, elastic):
    notice_s = 15
    # fmt: off
    cluster.lab.run(
        HEAD, "env", "RAY_AUTH_MODE=token", "ray", "drain-node", f"--address={address_of(HEAD)}:6379",
        f"--node-id={cluster.nodes()['h2']['node_id']}", "--reason=DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message=spot", f"--deadline-remaining-seconds={notice_s}",
    )
    # fmt: on
    time.sleep(notice_s)
    last = steps_of(cluster.log(elastic))[-1]
    cluster.lab.power_cut("h2")
    cluster.lab.start("h2")
    until(lambda: resumed_at(cluster.log(elastic)), "the run's return")
    [at] = resumed_at(cluster.log(elastic))
    assert f"a node is being taken away; step {at} is kept" in cluster.log(
        elastic
    )
    assert last <= at < last + TOLD, (
        "no step that would have been told was made after it"
    )


def test_a_power_cut_costs_the_checkpoint_interval_at_most(cluster, elastic):
    until(lambda: cluster.alive() == HOSTS, "the host's return", every_s=1)
    before = resumed_at(cluster.log(elastic))
    until(
        lambda: steps_of(cluster.log(elastic))[-1] > before[-1] + INTERVAL,
        "a checkpoint since then",
    )
    cluster.lab.power_cut("h1")
    until(lambda: cluster.nodes()["h1"]["state"] == "DEAD", "the node's death")
    last = steps_of(cluster.log(elastic))[-1]
    until(
        lambda: len(resumed_at(cluster.log(elastic))) > len(before),
        "the run's return",
    )
    assert (
        last - INTERVAL - TOLD
        <= resumed_at(cluster.log(elastic))[-1]
        <= last + TOLD
    )


def test_a_stopped_job_leaves_a_checkpoint_of_its_last_step(cluster, elastic):
    until(
        lambda: (
            steps_of(cluster.log(elastic))[-1]
            > resumed_at(cluster.log(elastic))[-1]
        ),
        "a step",
    )
    cluster.stop(elastic)
    assert cluster.job(elastic) == "STOPPED"
    log = cluster.log(elastic)
    run = cluster.lab.shared / "paceline" / "elastic"
    stopped = re.search(r"stopped: (\d+) steps", log)
    assert stopped, log[-6000:]
    assert (
        run / "checkpoints" / f"step-{int(stopped[1]):012}" / "manifest.json"
    ).exists()
    steps = logged_steps(run)
    assert steps == sorted(set(steps)), "no step is in the log twice"


def test_check_names_a_host_that_is_out_of_reach(
    cluster,
):
    cluster.lab.partition("h2")
    try:
        code, report = check(cluster, "--quick")
    finally:
        cluster.lab.heal("h2")
        cluster.lab.start("h1")
    assert (code, named(report)) == (1, {("h2", "node")})
    until(
        lambda: cluster.alive() == HOSTS,
        lambda: f"all hosts back, only {cluster.alive()}",
        every_s=1,
    )


def test_ray_down_leaves_nothing(cluster):
    assert "No nodes remaining" in cluster.down()

    def left():
        outputs = [
            cluster.lab.run(name, "ps", "-eo", "args").stdout
            for name in cluster.lab.names
        ]
        return [
            line
            for line in "\n".join(outputs).splitlines()
            if re.search(r"raylet|gcs_server|ray::|/ray/", line)
        ]

    until(lambda: not left(), "the workers' end", every_s=1)
    cluster.lab.close()
    assert cluster.lab.processes() == []

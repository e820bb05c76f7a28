"""Spot notices, read from the metadata services of three clouds in all of
their moods; and spot that is refused.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray.autoscaler.v2.instance_manager.node_provider import LaunchNodeError
from ray.autoscaler.v2.instance_manager.reconciler import Reconciler
from ray.autoscaler.v2.instance_manager.subscribers.cloud_resource_monitor import (
    CloudResourceMonitor,
)
from ray.core.generated.instance_manager_pb2 import Instance

from cluster import notices, spot
from cluster.__main__ import main
from cluster.notices import SERVICES, wait_for_notice
from tests.metadata_service import hang, hang_up, metadata_service, respond
from tests.specs import REPOSITORY
from tests.waits import HANG_S, until, when

CLOUDS = ("aws", "gcp", "azure")
AT = "2031-09-18T08:22:00Z"
HTTP_AT = "Thu, 18 Sep 2031 08:22:00 GMT"
AT_UNIX = 1947486120.0


@pytest.fixture
def machine(monkeypatch):
    """A spot machine; a proxy that nobody answers at stands in the environment."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with metadata_service() as started:
        yield started


def preempt(machine):
    """Take the machine back, as each of the clouds says it."""
    machine.action = {"action": "terminate", "time": AT}
    machine.events.append(eviction(HTTP_AT))
    machine.preempted = True


def eviction(not_before, *names, kind="Preempt"):
    return {
        "EventType": kind,
        "Resources": list(names or ("WORKER-7",)),
        "NotBefore": not_before,
    }


def wait(cloud, machine, looks=100):
    """The notice, how long was waited for Ray's end before each look, and what
    was said; nothing is slept.
    """
    waited = []
    said = []

    def has_ended(wait_s):
        waited.append(wait_s)
        return len(waited) > looks

    return (
        wait_for_notice(
            SERVICES[cloud](machine.address), has_ended, said.append
        ),
        waited,
        said,
    )


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_notice_is_heard_with_its_deadline(cloud, machine):
    asked = len(machine.asked)
    assert wait(cloud, machine, looks=3)[0] is None, "Ray ended first"
    assert len(machine.asked) > asked
    preempt(machine)
    before = time.time()
    notice, waited, said = wait(cloud, machine)
    assert (
        before + 30 <= notice.deadline_s <= time.time() + 30
        if cloud == "gcp"
        else notice.deadline_s == AT_UNIX
    )
    assert (waited, said) == ([0.0], []), "at the first look"


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_service_that_hangs_is_asked_again(cloud, machine, monkeypatch):
    monkeypatch.setattr(notices, "_TIMEOUT_S", 0.5)
    preempt(machine)
    machine.faults.extend([hang] * 2)
    notice, waited, said = wait(cloud, machine)
    assert notice is not None
    assert len(waited) >= 3
    assert len(said) == 1


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_service_in_trouble_is_asked_again_and_said_once(cloud, machine):
    answers = [
        *(
            (status, "")
            for status in (200, 400, 401, 403, 404, 410, 429, 500, 503)
        )
    ]
    answers += [(200, text) for text in ("<html>", "[]", "{}", "[" * 9999)]
    faults = [
        hang_up,
        *(
            lambda handler, said=said: respond(handler, *said)
            for said in answers
        ),
    ]
    machine.faults.extend(faults)
    before = len(machine.asked)
    notice, waited, said = wait(cloud, machine, looks=40)
    assert notice is None
    assert len(waited) == 41
    assert machine.faults == []
    assert said[-1] == "the metadata service answers again"
    assert len(said) < 12, "what goes on is not said again"
    assert len(machine.asked) > before + len(faults)
    preempt(machine)
    assert wait(cloud, machine)[0] is not None


def test_ec2_without_a_time_means_two_minutes(machine):
    machine.action = {"action": "hibernate"}
    before = time.time()
    notice = SERVICES["aws"](machine.address).notice()
    assert before + 120 <= notice.deadline_s <= time.time() + 120


def test_azure_tells_the_whole_scale_set(machine):
    service = SERVICES["azure"](machine.address)
    machine.events = [
        eviction(HTTP_AT, "worker-70", "another"),
        eviction(HTTP_AT, kind="Freeze"),
        eviction(HTTP_AT, kind="Reboot"),
    ]
    assert service.notice() is None
    machine.events.append(eviction(HTTP_AT, "another", "worker-7"))
    notice = service.notice()
    assert notice.deadline_s == AT_UNIX
    machine.events = [eviction("")]  # as it is when the eviction has begun
    before = time.time()
    notice = service.notice()
    assert before + 30 <= notice.deadline_s <= time.time() + 30


def test_the_command_without_ray(capsys):
    assert main(["watch", "aws", "--node", "none-has-this-id"]) != 0
    assert "start Ray, or give another --node" in capsys.readouterr().err


NODE = f"unit-test-{os.getpid()}"
"""The tests of this file may run in several processes."""


@pytest.fixture
def raylet(tmp_path):
    """A process that looks like the raylet of the node NODE."""
    command = [
        "/anywhere/raylet/raylet",
        "-c",
        "import time; time.sleep(3600)",
    ]
    flags = [
        f"--node_id={NODE}",
        "--gcs-address=127.0.0.1:9",
        f"--raylet_socket_name={tmp_path}/sockets/raylet",
    ]
    with subprocess.Popen(
        [*command, *flags], executable=sys.executable
    ) as process:
        while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
            time.sleep(0.001)  # the kernel shows it a moment after the start
        yield process
        process.kill()


def test_the_watcher_ends_with_ray(machine, raylet, capsys):
    when(lambda: bool(machine.asked), raylet.terminate)
    assert (
        main(["watch", "azure", "--node", NODE, "--address", machine.address])
        == 0
    )
    assert raylet.wait() != 0
    assert f"azure takes back Ray's node {NODE}" in capsys.readouterr().out


def test_ray_is_asked_until_it_drains_the_node(machine, raylet, monkeypatch):
    """The head may be away for a moment."""
    asked = []
    answers = iter([RuntimeError("no head"), (False, "not yet"), (True, "")])

    class Client:
        def __init__(self, address):
            assert address == "127.0.0.1:9"

        def drain_node(self, *args, timeout):
            asked.append(args)
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

    monkeypatch.setattr("trainers.on_ray.internals.GcsClient", Client)
    monkeypatch.setattr(spot, "_AGAIN_S", 0.0)
    preempt(machine)
    assert (
        main(["watch", "aws", "--node", NODE, "--address", machine.address])
        == 0
    )
    preemption = 2  # of Ray's DrainNodeReason
    assert (
        asked
        == [(NODE, preemption, "EC2's notice: terminate", int(AT_UNIX * 1000))]
        * 3
    )


def test_the_autoscaler_ends_with_ray(raylet, tmp_path):
    """It is Ray's own, and writes its log where `ray monitor` looks for it."""
    (tmp_path / "logs").mkdir()
    config = str(REPOSITORY / "cluster" / "aws.yaml")
    command = [
        sys.executable,
        "-m",
        "cluster",
        "autoscale",
        config,
        "--node",
        NODE,
    ]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as autoscaler:
        log = tmp_path / "logs" / "monitor.log"
        until(
            lambda: (
                log.exists() and "--gcs-address=127.0.0.1:9" in log.read_text()
            ),
            "its log",
            process=autoscaler,
        )
        raylet.kill()
        assert autoscaler.wait(HANG_S) == 0


STEPS = ("_try_resolve_pending_allocation", "_handle_stuck_requested_instance")


def refused():
    """What Ray thinks of node types after EC2 has refused a spot machine."""
    instance = Instance(
        instance_id="1",
        instance_type="gpu_spot",
        launch_request_id="r",
        status=Instance.REQUESTED,
    )
    error = LaunchNodeError("gpu_spot", 1, "r", 0)
    key = "r", "gpu_spot"
    update = Reconciler._try_resolve_pending_allocation(
        instance, {}, {key: error}, {key: 1}
    )
    assert update.new_instance_status == Instance.ALLOCATION_FAILED
    monitor = CloudResourceMonitor()
    monitor.notify([update])
    return monitor.get_recoverable_resource_availabilities()


def test_a_refused_type_is_left_aside(monkeypatch):
    assert refused() == {}, (
        "Ray by itself; where this fails, cluster/spot.py's `autoscale` has become needless"
    )
    for step in STEPS:
        monkeypatch.setattr(Reconciler, step, Reconciler.__dict__[step])
    monkeypatch.setattr(
        CloudResourceMonitor, "notify", CloudResourceMonitor.notify
    )
    spot.heed_refusals()
    assert refused() == {"gpu_spot": 0.0}


def test_the_autoscaler_s_file_must_exist(tmp_path, capsys):
    assert main(["autoscale", str(tmp_path / "none.yaml")]) == 2
    assert str(tmp_path / "none.yaml") in capsys.readouterr().err

"""`python -m cluster check` on a live cluster: two raylets of this machine
under examination.
"""

import json
import time

import pytest

from tests.on_ray.nodes import another_node
from tests.waits import HANG_S

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def second_node(cluster, driver):
    """The id of another node of one CPU."""
    with another_node(cluster, driver, cpus=1) as node:
        yield node.id


def divided(number, by):
    return divmod(number, by)


def asleep():
    time.sleep(600)


@pytest.mark.campaign  # the lab examines three hosts
def test_two_nodes_are_examined(tmp_path, cluster, second_node, command):
    options = ("--storage_path", str(tmp_path / "shared"), "--json")
    done = command("-m cluster check", *options, ray_address=cluster.address)
    report = json.loads(done.out)
    assert (done.code, report["findings"]) == (0, [])
    assert [node["verdict"] for node in report["nodes"]] == ["ok", "ok"]
    assert all(node["device"] for node in report["nodes"])
    assert list((tmp_path / "shared").iterdir()) == [], "no marker is left"


def test_a_sweep_is_refused_where_storage_cannot_be_written(
    tmp_path, second_node, driver
):
    from cluster.health.check import require_sound
    from trainers.errors import ClusterError

    require_sound(str(tmp_path))
    unwritable = tmp_path / "file"
    unwritable.write_text("in the way")
    with pytest.raises(ClusterError) as caught:
        require_sound(str(unwritable))
    assert str(caught.value).count("`storage: ") == 2


def test_a_probe_that_fails_names_its_node(second_node, driver):
    from cluster.health.check import Checkup

    nodes = Checkup()
    answers = nodes.ask(
        "dividing",
        HANG_S,
        {node: (divided, 1, node == second_node) for node in nodes.nodes},
    )
    assert list(answers) == [second_node]
    [failed] = nodes.found
    assert failed.node_id != second_node
    assert (
        failed.value
        == "dividing: ZeroDivisionError: integer division or modulo by zero"
    )
    nodes.ask("sleeping", 0.5, {second_node: (asleep,)})
    silent = nodes.found[-1]
    assert (silent.node_id, silent.value) == (
        second_node,
        "no answer while sleeping",
    )
    assert nodes.answering() == []

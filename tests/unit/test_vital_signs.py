"""Who among a driver's actors counts as silent, and what then happens to it."""

import pytest
import ray
from ray import cloudpickle

from trainers.on_ray import vital_signs
from trainers.on_ray.vital_signs import VitalSigns

PREFIX = "paceline/alive/01/"
LOOKS = vital_signs._LOOKS


class Store:
    """The key-value store of a cluster of one job, with the actors' states and
    who was killed.
    """

    def __init__(self):
        self.data = {}
        self.states = {}
        self.killed = []

    def beat(self, actor, count):
        self.states.setdefault(actor, "ALIVE")
        self.data[f"{PREFIX}{actor}".encode()] = str(count).encode()
        self.data[f"{PREFIX}{actor}/handle".encode()] = cloudpickle.dumps(
            actor
        )

    def delete(self, name, del_by_prefix):
        prefix = name if isinstance(name, bytes) else name.encode()
        self.data = {
            key: value
            for key, value in self.data.items()
            if not key.startswith(prefix)
        }


@pytest.fixture
def store(monkeypatch):
    made = Store()
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(vital_signs, "_prefix", lambda: PREFIX)
    monkeypatch.setattr(vital_signs, "kv_list", lambda prefix: list(made.data))
    monkeypatch.setattr(vital_signs, "kv_get", lambda key: made.data.get(key))
    monkeypatch.setattr(vital_signs, "kv_delete", made.delete)
    monkeypatch.setattr(
        ray._private.state, "actors", lambda name: {"State": made.states[name]}
    )
    monkeypatch.setattr(ray, "kill", lambda handle: made.killed.append(handle))
    return made


def test_an_actor_that_falls_silent_is_killed_once_and_no_other(store):
    signs = VitalSigns()
    for count in range(2 * LOOKS):
        store.beat("speaks", count)
        if count == 0:
            store.beat("silent", count)
        signs.look()
        assert store.killed == (["silent"] if count >= LOOKS else [])

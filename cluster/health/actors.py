"""Actors that run probes, one on every node, and who of them has stopped answering (Ray)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.health.facts import NodeFacts
from cluster.health.links import Link
from trainers.errors import last_line
from trainers.on_ray.gpus import hide_unassigned_gpus

Call = tuple[Any, ...]  # a function, or the name of a method of Probe, and its arguments


class Probe:
    """Runs probes on its node."""

    def __init__(self) -> None:
        hide_unassigned_gpus()  # something else trains on them: products beside it are slow, and the node is called bad
        self._link: Link | None = None

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a function of cluster/health/probes.py or cluster/health/links.py."""
        return function(*args)

    def listen(self, address: str) -> int:
        """Receive from another node; return the port."""
        self._link = Link(address)
        return self._link.port

    def received(self) -> float:
        """Return the MB/s that the other node sent."""
        assert self._link is not None
        return self._link.rate()


@dataclass
class Nodes:
    """The living nodes of the connected cluster; one that fails to answer is left out of what follows."""

    facts: dict[str, NodeFacts] = field(default_factory=dict)
    """By node id."""
    _actors: dict[str, Any] = field(default_factory=dict)

    def start(self) -> None:
        """Start an actor on every node that is alive; it holds the node's GPUs if nothing else does."""
        available = available_resources_per_node()
        for node in ray.nodes():
            if not node["Alive"]:
                continue
            node_id, resources = node["NodeID"], node["Resources"]
            gpus = int(resources.get("GPU", 0))
            free = available.get(node_id, {}).get("GPU", 0) >= gpus
            strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
            actor = ray.remote(Probe).options(
                num_cpus=0, num_gpus=gpus if free else 0, max_restarts=0, scheduling_strategy=strategy
            )
            self._actors[node_id] = actor.remote()
            host, address = node["NodeManagerHostname"], node["NodeManagerAddress"]
            trains = resources.get("CPU", 0) + gpus > 0
            self.facts[node_id] = NodeFacts(node_id, host, address, trains, num_gpus=gpus)

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors.values():
            ray.kill(actor)

    def answering(self, training: bool = False) -> list[str]:
        """List the nodes that have answered everything so far; `training`: only those for workers."""
        return [
            node_id
            for node_id, facts in self.facts.items()
            if facts.silent_in is None and facts.failure is None and (facts.trains or not training)
        ]

    def note(self, node_id: str, **facts: Any) -> None:
        """Change what is known of a node."""
        self.facts[node_id] = replace(self.facts[node_id], **facts)

    def ask(self, part: str, timeout_s: float, calls: Mapping[str, Call]) -> dict[str, Any]:
        """Return results by node id, of all `calls` at once.

        Notes which node gave none in time, or failed.
        """
        references = {}
        for node_id, (function, *args) in calls.items():
            name, sent = (function, args) if isinstance(function, str) else ("call", [function, *args])
            references[node_id] = getattr(self._actors[node_id], name).remote(*sent)
        ready, _ = ray.wait(list(references.values()), num_returns=len(references), timeout=timeout_s)
        results = {}
        for node_id, reference in references.items():
            if reference not in ready:
                self.note(node_id, silent_in=part)
                continue
            try:
                results[node_id] = ray.get(reference)
            except ray.exceptions.RayTaskError as error:
                self.note(node_id, failure=f"{part}: {last_line(error)}")
            except ray.exceptions.ActorUnavailableError:
                self.note(node_id, silent_in=part)
            except ray.exceptions.RayActorError as error:
                # An actor whose class cannot be imported there has died of it; else its node is gone.
                words = last_line(error)
                self.note(node_id, **({"failure": words} if "Error:" in words else {"silent_in": part}))
            except ray.exceptions.RayError as error:
                self.note(node_id, silent_in=f"{part} ({type(error).__name__})")
        return results

    def learn(self, fact: str, part: str, timeout_s: float, function: Any, *args: Any, training: bool = False) -> None:
        """Ask the same of all that answer, and note each answer as a field of the node's facts."""
        calls = dict.fromkeys(self.answering(training), (function, *args))
        for node_id, answer in self.ask(part, timeout_s, calls).items():
            self.note(node_id, **{fact: answer})

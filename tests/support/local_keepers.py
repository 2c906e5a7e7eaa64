"""Stands in for Ray where keepers of states are called, so that tests need no cluster.

A node is a name and a port that takes connections; the keeper of a node is an object of this
process, whose calls are done at once.
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, RayError

from mcore_rl.cluster.state_keepers import StateKeeper, StateKeepers


@dataclass(frozen=True)
class Done:
    """A call that was done: what it returned, or its error."""

    value: Any = None
    error: RayError | None = None


class LocalActor:
    """The handle of a keeper, which `die` ends."""

    def __init__(self) -> None:
        self.keeper: StateKeeper | None = StateKeeper()

    def die(self) -> None:
        if self.keeper is not None:
            self.keeper.close()
        self.keeper = None

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Done:
            if self.keeper is None:
                return Done(error=ActorDiedError())
            try:
                return Done(getattr(self.keeper, name)(*args))
            except RayError as error:
                return Done(error=error)
            except KeyError as error:
                return Done(error=RayError(f"KeyError: {error}"))

        return SimpleNamespace(remote=call)


def get(wanted: Any, timeout: float | None = None) -> Any:
    """Do as ray.get, for calls of a LocalActor."""
    if isinstance(wanted, list):
        return [get(each) for each in wanted]
    if wanted.error is not None:
        raise wanted.error
    return wanted.value


class LocalNodes:
    """Nodes that answer, until one is lost with its keeper."""

    def __init__(self, names: str) -> None:
        self.actors: dict[str, LocalActor] = {}
        self.num_started = 0
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._alive = set(names)

    def start(self, node: str) -> LocalActor:
        self.num_started += 1
        self.actors[node] = LocalActor()
        return self.actors[node]

    def lose(self, node: str) -> None:
        self._alive.discard(node)
        self.actors[node].die()

    def list_as_ray(self) -> list[dict[str, Any]]:
        """Return what ray.nodes does."""
        facts = {"NodeManagerAddress": "127.0.0.1", "Alive": True, "Labels": {}, "Resources": {}}
        facts["NodeManagerPort"] = self._listening.getsockname()[1]
        return [{**facts, "NodeID": n, "NodeName": f"host-{n}"} for n in sorted(self._alive)]

    def close(self) -> None:
        for actor in self.actors.values():
            actor.die()
        self._listening.close()


def open_keepers(nodes: LocalNodes, monkeypatch: pytest.MonkeyPatch, names: str) -> StateKeepers:
    """Return keepers of these nodes, where `names` are the nodes with ranks."""
    context = SimpleNamespace(get_node_id=lambda: "controller")
    own: dict[str, Callable[..., Any]] = {
        "get": get,
        "kill": lambda actor: actor.die(),
        "nodes": nodes.list_as_ray,
        "get_runtime_context": lambda: context,
    }
    for name, function in own.items():
        monkeypatch.setattr(ray, name, function)
    return StateKeepers(names, 20.0, nodes.start)

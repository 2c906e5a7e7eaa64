"""Tells which ranks that owe an answer are stopped, as their nodes say."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mcore_rl.process.process_state import describe_state

_READ_S = 5.0
"""Time for another node to tell the states of its processes."""


def find_states(places: Sequence[tuple[Any, str]]) -> list[str]:
    """Return, for each (reference to a process id, node), `describe_state` of the process.

    It is empty as well for a process whose id or node does not answer.
    """
    own = ray.get_runtime_context().get_node_id()
    by_node: dict[str, dict[int, Any]] = defaultdict(dict)
    for k, (pid, node) in enumerate(places):
        if ray.wait([pid], timeout=0)[0]:
            by_node[node or own][k] = pid
    refs = {_ask(node, pids): list(pids) for node, pids in by_node.items() if node != own}
    answered = ray.wait(list(refs), num_returns=len(refs), timeout=_READ_S)[0] if refs else []
    states = {k: describe_state(_get(pid) or 0) for k, pid in by_node[own].items()}
    for ref in answered:
        states |= zip(refs[ref], _get(ref) or (), strict=False)
    return [states.get(k, "") for k in range(len(places))]


def _ask(node: str, pids: dict[int, Any]) -> Any:
    """Return a reference to the states of the processes of another node."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    task: Any = ray.remote(num_cpus=0, max_retries=0)(_describe_all)
    return task.options(scheduling_strategy=there).remote(*pids.values())


def _describe_all(*pids: int) -> list[str]:
    return [describe_state(pid) for pid in pids]


def _get(ref: Any) -> Any:
    """Return what a reference that is ready refers to; None if that is an error."""
    try:
        return ray.get(ref)
    except RayError:
        return None

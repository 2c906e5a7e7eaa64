"""Divides engines that span machines into servers, one per machine, and joins what those tell."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, islice
from pathlib import Path
from typing import TypeVar

from mcore_rl.rollout.engine_health import EngineState
from mcore_rl.rollout.engine_spec import EngineSpec

T = TypeVar("T")


def plan_servers(
    specs: Sequence[EngineSpec],
    nodes_per_engine: Sequence[int],
    meeting_points: Sequence[tuple[str, int]],
    gpu_ids: Sequence[str],
) -> list[tuple[int, EngineSpec]]:
    """Return (engine index, spec) of every server: one per node of each engine, in order.

    `meeting_points` has an (address, port) by server; it may be empty if no engine spans nodes.
    `gpu_ids` are handed out in order, tp * pp for each engine; if empty, no server is told which
    GPUs to use.
    """
    servers: list[tuple[int, EngineSpec]] = []
    remaining_gpus = iter(gpu_ids)
    for engine, (spec, num_nodes) in enumerate(zip(specs, nodes_per_engine, strict=True)):
        meeting_point = None
        node_addresses: tuple[str, ...] = ()
        if num_nodes > 1:
            address, port = meeting_points[len(servers)]
            meeting_point = f"{address}:{port}"
            of_nodes = meeting_points[len(servers) : len(servers) + num_nodes]
            node_addresses = tuple(address for address, _ in of_nodes)
        ranks_per_node = spec.tp * spec.pp // num_nodes
        for node_rank in range(num_nodes):
            server_spec = replace(
                spec,
                num_nodes=num_nodes,
                node_rank=node_rank,
                dist_init_addr=meeting_point,
                node_addresses=node_addresses,
                gpu_ids=tuple(islice(remaining_gpus, ranks_per_node)),
            )
            servers.append((engine, _give_own_log(server_spec)))
    return servers


def combine_states(
    server_states: Sequence[EngineState], nodes_per_engine: Sequence[int]
) -> list[EngineState]:
    """Return each engine's state, from the states of its servers.

    An engine's restart count is the highest of its servers. The engine is healthy if its first
    server, which waits for the others, is healthy and has this count.
    """
    remaining = iter(server_states)
    states = []
    for num_nodes in nodes_per_engine:
        engine_servers = list(islice(remaining, num_nodes))
        first = engine_servers[0]
        restarts = max(state.restarts for state in engine_servers)
        healthy = first.healthy and first.restarts == restarts
        states.append(replace(first, restarts=restarts, healthy=healthy))
    return states


def pick_first_of_each_engine(values: Sequence[T], nodes_per_engine: Sequence[int]) -> list[T]:
    """Return the values of the servers on the engines' first nodes, given a value per server."""
    first_servers = accumulate(nodes_per_engine[:-1], initial=0)
    return [values[server] for server in first_servers]


def _give_own_log(spec: EngineSpec) -> EngineSpec:
    """Return the spec; on all nodes but the first, with the node in the log's name."""
    if spec.node_rank == 0:
        return spec
    log = Path(spec.log_path)
    name = f"{log.stem}_node{spec.node_rank}{log.suffix}"
    return replace(spec, log_path=str(log.with_name(name)))

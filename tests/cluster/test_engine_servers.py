"""Engines that span machines: specs of their servers, and an engine's state from its servers'."""

from dataclasses import replace

import pytest

from mcore_rl.cluster.engine_servers import combine_states, pick_first_of_each_engine, plan_servers
from mcore_rl.rollout.engine_health import EngineState
from mcore_rl.rollout.engine_spec import EngineSpec

SPEC = EngineSpec("model", "/logs/sglang_0.log", tp=4)


def test_an_engine_on_one_machine_is_one_server() -> None:
    specs = [SPEC, replace(SPEC, log_path="/logs/sglang_1.log")]
    servers = plan_servers(specs, [1, 1], [], gpu_ids=())
    assert [engine for engine, _ in servers] == [0, 1]
    assert [spec for _, spec in servers] == specs


def test_servers_of_an_engine_meet_at_its_first_machine_and_have_logs_of_their_own() -> None:
    points = [("a", 1), ("b", 2), ("c", 3), ("d", 4)]
    servers = plan_servers([SPEC, SPEC], [2, 2], points, gpu_ids=())
    assert [engine for engine, _ in servers] == [0, 0, 1, 1]
    assert [spec.dist_init_addr for _, spec in servers] == ["a:1", "a:1", "c:3", "c:3"]
    assert [spec.node_addresses for _, spec in servers] == [("a", "b")] * 2 + [("c", "d")] * 2
    assert [(spec.num_nodes, spec.node_rank) for _, spec in servers] == [(2, 0), (2, 1)] * 2
    logs = [spec.log_path for _, spec in servers[:2]]
    assert logs == ["/logs/sglang_0.log", "/logs/sglang_0_node1.log"]


def test_gpus_are_handed_out_in_order() -> None:
    gpus = [str(gpu) for gpu in range(8)]
    servers = plan_servers([replace(SPEC, tp=2, pp=2)] * 2, [2, 1], [("a", 1)] * 3, gpus)
    given = [spec.gpu_ids for _, spec in servers]
    assert given == [("0", "1"), ("2", "3"), ("4", "5", "6", "7")]


@pytest.mark.parametrize(
    ("servers", "expected"),
    [
        ([(0, True), (0, True)], (0, True)),
        ([(1, True), (0, True)], (1, True)),
        ([(0, True), (1, True)], (1, False)),
        ([(1, False), (1, True)], (1, False)),
        ([(1, True), (1, False)], (1, True)),
    ],
)
def test_an_engine_is_as_healthy_as_its_first_server_once_all_were_restarted(
    servers: list[tuple[int, bool]], expected: tuple[int, bool]
) -> None:
    """(restarts, healthy) of both servers -> of the engine."""
    states = [EngineState(f"http://{i}", *state) for i, state in enumerate(servers)]
    other = EngineState("http://other", 3, True)
    assert combine_states([other, *states], [1, 2]) == [other, EngineState("http://0", *expected)]


def test_an_engine_answers_at_its_first_server() -> None:
    assert pick_first_of_each_engine("abcdef", [2, 1, 3]) == ["a", "c", "d"]

"""Which engines get requests after restarts and syncs."""

from mcore_rl.rollout.engine_health import EngineHealth, EngineState, JoinedEngine, Rotation
from mcore_rl.rollout.engine_spec import EngineAddress
from mcore_rl.types import WeightVersion

A, B = "http://a:1", "http://b:2"


def test_a_restarted_engine_waits_for_the_sync_that_names_it() -> None:
    health = EngineHealth([A, B])
    assert health.serving == [A, B]
    health.note([EngineState(A), EngineState(B, restarts=1, healthy=False)])
    assert health.serving == [A]
    assert "started again" in health.why_out(B)
    health.note([EngineState(A), EngineState(B)])
    assert health.states[1] == EngineState(B, restarts=1, healthy=False), "seen before, told later"
    health.note([EngineState(A), EngineState(B, restarts=1)])
    assert health.serving == [A], "what a new process serves is not the current weights"
    health.set_serving([A], {})
    assert "started again" in health.why_out(B)
    health.set_serving([A, B], {})
    assert health.serving == [A, B] and health.why_out(B) == ""


def test_reasons_are_those_of_the_last_sync() -> None:
    health = EngineHealth([A, B])
    health.set_serving([B], {A: "a checksum differs"})
    assert (health.why_out(A), health.why_out(B)) == ("a checksum differs", "")
    health.set_serving([A], {})
    assert health.serving == [A]
    assert health.why_out(B)


def test_an_engine_whose_weights_stay_serves_as_soon_as_it_is_up_again() -> None:
    health = EngineHealth([A, B], weights_stay=True)
    health.note([EngineState(A), EngineState(B, restarts=1, healthy=False)])
    assert health.serving == [A]
    health.note([EngineState(A), EngineState(B, restarts=1)])
    assert health.serving == [A, B] and health.why_out(B) == ""


def test_another_process_follows_with_reasons_and_version() -> None:
    health, other = EngineHealth([A, B]), EngineHealth([A, B])
    assert health.rotation == Rotation({A: "", B: ""})
    health.set_serving([A], {B: "it is gone"}, WeightVersion(7))
    other.follow(health.rotation)
    assert other.serving == [A] and other.why_out(B) == "it is gone" and other.version == 7
    assert other.rotation == health.rotation


def test_an_engine_that_moved_leaves_its_address_and_waits_at_another_for_a_sync() -> None:
    addresses = [EngineAddress(url, "") for url in (A, B)]
    health, other = EngineHealth([A, B]), EngineHealth([A, B])
    moved = JoinedEngine(EngineAddress("http://c:3", "", number=1), home=1)
    health.lose(B, "its node is gone")
    health.leave(B)
    health.join(moved, "it has no weights yet")
    assert health.serving == [A] and health.take_left() == [B] and health.take_left() == []
    health.note([EngineState(B, restarts=1)])
    assert [state.url for state in health.states] == [A, "http://c:3"]
    other.follow(health.rotation)
    assert other.why_out("http://c:3") == "it has no weights yet" and other.why_out(B)
    assert other.list_current(addresses) == [addresses[0], moved.address]
    assert other.list_current(addresses[1:], home=1) == [moved.address]
    assert other.list_current(addresses[:1], home=0) == addresses[:1]
    health.set_serving([A, "http://c:3"], {}, WeightVersion(3))
    other.follow(health.rotation)
    assert other.serving == [A, "http://c:3"] and other.version == 3
    assert other.num_changes == 2, "it joined and the first one left, once"


def test_an_engine_that_is_drained_serves_no_more_whatever_a_sync_says() -> None:
    health = EngineHealth([A, B])
    with health.drain(B):
        assert health.serving == [A] and health.why_out(B) == "it is being drained"
        health.set_serving([A, B], {})
        assert health.serving == [A] and health.why_out(B) == "it is being drained"
    health.set_serving([A, B], {})
    assert health.serving == [A, B], "it stayed after all"

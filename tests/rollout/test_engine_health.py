"""Which engines get requests after restarts and syncs."""

from mcore_rl.rollout.engine_health import EngineHealth, EngineState

A, B = "http://a:1", "http://b:2"


def test_a_restarted_engine_waits_for_the_sync_that_names_it() -> None:
    rotation = EngineHealth([A, B])
    assert rotation.serving == [A, B]
    rotation.note([EngineState(A), EngineState(B, restarts=1, healthy=False)])
    assert rotation.serving == [A]
    assert "started again" in rotation.why_out(B)
    rotation.note([EngineState(A), EngineState(B)])
    assert rotation.lives[1] == EngineState(B, restarts=1, healthy=False), "seen before, told later"
    rotation.note([EngineState(A), EngineState(B, restarts=1)])
    assert rotation.serving == [A], "what a new process serves is not the current weights"
    rotation.set_serving([A], {})
    assert "started again" in rotation.why_out(B)
    rotation.set_serving([A, B], {})
    assert rotation.serving == [A, B] and rotation.why_out(B) == ""


def test_reasons_are_those_of_the_last_sync() -> None:
    rotation = EngineHealth([A, B])
    rotation.set_serving([B], {A: "a checksum differs"})
    assert (rotation.why_out(A), rotation.why_out(B)) == ("a checksum differs", "")
    rotation.set_serving([A], {})
    assert rotation.serving == [A]
    assert rotation.why_out(B)


def test_an_engine_whose_weights_stay_serves_as_soon_as_it_is_up_again() -> None:
    rotation = EngineHealth([A, B], weights_stay=True)
    rotation.note([EngineState(A), EngineState(B, restarts=1, healthy=False)])
    assert rotation.serving == [A]
    rotation.note([EngineState(A), EngineState(B, restarts=1)])
    assert rotation.serving == [A, B] and rotation.why_out(B) == ""

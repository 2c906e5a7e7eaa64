"""Trainer and critic in turn."""

from mcore_rl.loops.roles import in_turn


def test_the_first_ends_before_the_second_begins() -> None:
    calls: list[str] = []

    def call(name: str) -> str:
        calls.append(f"{name} begins")
        calls.append(f"{name} ends")
        return name

    assert in_turn(lambda: call("a"), lambda: call("b")) == ("a", "b")
    assert calls == ["a begins", "a ends", "b begins", "b ends"]

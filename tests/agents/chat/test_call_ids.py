"""Ids of calls."""

from itertools import count

from mcore_rl.agents.chat.tool_syntax import CallIds


def kimi(call_id: str) -> str:
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"


def test_ids_are_made() -> None:
    numbers = count()
    ids = CallIds("qwen25", lambda: f"call_{next(numbers)}", ())
    assert [ids.make("look", ""), ids.make("look", "")] == ["call_0", "call_1"]


def test_kimi_names_its_calls() -> None:
    ids = CallIds("kimi_k2", str, ["functions.look:0"])
    assert ids.make("look", kimi("functions.look:1")) == "functions.look:1"
    assert ids.make("go", kimi("functions.go:2")) == "functions.go:2"


def test_an_id_of_kimi_that_is_taken_or_missing_is_replaced() -> None:
    ids = CallIds("kimi_k2", str, ["functions.look:0", "functions.look:2"])
    made = [ids.make("look", kimi(name)) for name in ("functions.look:0", "3", "functions.look:2")]
    assert len({*made, "functions.look:0", "functions.look:2"}) == 5
    assert all(call_id.startswith("functions.look:") for call_id in made)

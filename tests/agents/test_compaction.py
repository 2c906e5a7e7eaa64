"""The first messages and the last answers stay."""

from mcore_rl.agents.messages import Message, keep_last_answers


def message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def test_earlier_answers_are_left_out_with_what_followed_them() -> None:
    start = [message("system", "s"), message("user", "task")]
    turns = [
        [message("assistant", f"a{i}"), message("tool", f"r{i}"), message("user", f"u{i}")]
        for i in range(3)
    ]
    whole = [*start, *turns[0], *turns[1], *turns[2]]
    assert keep_last_answers(whole, 1) == [*start, *turns[2]]
    assert keep_last_answers(whole, 2) == [*start, *turns[1], *turns[2]]
    assert keep_last_answers(whole, 3) == whole == keep_last_answers(whole, 9)
    assert keep_last_answers(start, 1) == start == keep_last_answers(start, 0)
    assert keep_last_answers(whole, 0) == [start[0], *turns[2][1:]]

"""Text of messages, added and cut."""

from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.agents.environments.environment import add_text, cut, join_texts

IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


def test_content_is_a_string_parts_or_nothing():
    assert join_texts({"content": "a"}) == "a"
    assert join_texts({"content": [{"type": "text", "text": "a"}, IMAGE]}) == "a"
    assert join_texts({"content": None}) == join_texts({}) == ""


def test_text_joins_the_users_last_message():
    system = {"role": "system", "content": "s"}
    user = {"role": "user", "content": "u"}
    added = {"role": "user", "content": "x"}
    assert add_text([system], "x") == [system, added]
    assert add_text([system, user], "x") == [system, {"role": "user", "content": "u\n\nx"}]
    assert add_text([user], "") == [user]
    parts = add_text([{"role": "user", "content": [IMAGE]}], "x")
    assert parts == [{"role": "user", "content": [IMAGE, {"type": "text", "text": "x"}]}]


@given(st.text(), st.integers(0, 50))
def test_a_cut_text_keeps_both_ends(text, most):
    short = cut(text, most)
    if most == 0 or len(text) <= most:
        assert short == text
    else:
        head, tail = text[: most - most // 2], text[len(text) - most // 2 :]
        assert short == f"{head}\n[{len(text) - most} characters left out]\n{tail}"

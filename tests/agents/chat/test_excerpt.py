"""Excerpts of conversations keep every kind of turn, and what the newest messages refer to."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.agents.chat.shortcut import does_refer_outside, find_template_words, make_excerpt
from mcore_rl.agents.messages import Message
from tests.support.conversations import conversations


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str, **fields: Any) -> Message:
    return {"role": "assistant", "content": text, **fields}


def test_of_equal_turns_the_latest_stays():
    told = [message for i in range(9) for message in (user(f"q{i}"), said(f"a{i}"))]
    assert make_excerpt(told, ()) == [told[0], *told[-3:]]
    assert make_excerpt(told[:4], ()) is None


def test_a_turn_of_another_kind_stays_wherever_it_is():
    thoughtful = said("a", reasoning_content="why")
    told = [user("q"), thoughtful, user("q1")]
    told += [message for i in range(9) for message in (said(f"a{i}"), user(f"u{i}"))]
    told.append(said("last"))
    assert make_excerpt(told, ()) == [*told[:3], *told[-3:]]


def test_nothing_is_left_out_that_templates_look_for():
    told = [message for i in range(9) for message in (user(f"q{i}"), said(f"a{i} </think>"))]
    assert make_excerpt(told, ()) is not None
    assert make_excerpt(told, ["</think>"]) is None
    parts: Message = {"role": "user", "content": [{"type": "text", "text": "q"}]}
    assert make_excerpt([*told[:4], parts, *told[5:]], ()) is None
    system: Message = {"role": "system", "content": "be brief"}
    assert make_excerpt([*told[:4], system, told[5], system, *told[7:]], ()) is None


def test_a_late_result_of_a_call_needs_the_call():
    call = {"id": "call7", "function": {"name": "look", "arguments": "{}"}}
    excerpt = [user("q"), said("", tool_calls=[call])]
    result = {"role": "tool", "tool_call_id": "call7", "content": "there"}
    assert not does_refer_outside(excerpt, [result, user("u")])
    assert does_refer_outside(excerpt, [{**result, "tool_call_id": "call6"}])


@given(conversations(max_turns=8), st.booleans())
def test_an_excerpt_is_a_part_in_order_with_both_ends(conversation: Any, has_words: bool) -> None:
    told: list[Message] = list(conversation.start)
    for turn in conversation.turns:
        told += [turn.answer, *turn.new]
    while told[-1]["role"] != "assistant":
        told.pop()
    excerpt = make_excerpt(told, ["no such text"] if has_words else ())
    if excerpt is not None:
        places = [next(i for i, one in enumerate(told) if one is kept) for kept in excerpt]
        assert places == sorted(set(places)) and len(places) < len(told)
        assert places[0] == 0 and places[-1] == len(told) - 1


def test_words_are_what_a_template_compares_texts_with():
    template = (
        "{% for m in messages %}{% if m.role == 'user' and '<r>' in m.content %}<out>{% endif %}"
        "{% if m.content.startswith('/no') or m.content == '\\n' %}{{ m.content + '<a>' }}"
        "{% endif %}{% endfor %}"
    )
    assert find_template_words(template) == {"<r>", "/no"}
    assert find_template_words("{% for %}") is None

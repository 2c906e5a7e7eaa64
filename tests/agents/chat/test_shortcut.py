"""Excerpts give the ids of whole conversations, or are not used."""

import logging
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcore_rl.agents.chat import shortcut
from mcore_rl.agents.chat.chat_format import ChatFormat, Reasoning
from mcore_rl.agents.chat.shortcut import Shortcut, make_excerpt
from mcore_rl.agents.chat.template import TRIAL_TOOL
from mcore_rl.agents.messages import Message
from tests.agents.chat.test_chat_format import draw_conversation, make_blank_tokenizer, sampled
from tests.support.chat_templates import FAMILIES_BY_LANE, make_tokenizer, stop_ids
from tests.support.conversations import TOOLS

NUMBERED = (
    "{% for m in messages %}{{ loop.index }} {{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
few = settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])


def make_formats(family: str, reasoning: Reasoning) -> tuple[ChatFormat, ChatFormat]:
    """Return a format that uses excerpts, and one that does not."""
    tokenizer: Any = make_tokenizer(family)
    short, whole = (
        ChatFormat(tokenizer, stop_ids(family), reasoning=reasoning, template_options={})
        for _ in range(2)
    )
    assert short.allow_excerpts(), f"{family} renders some excerpt otherwise"
    return short, whole


@pytest.fixture(scope="module", params=FAMILIES_BY_LANE)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=("template", "keep"))
def formats(
    request: pytest.FixtureRequest, family: str
) -> tuple[str, tuple[ChatFormat, ChatFormat]]:
    return family, make_formats(family, request.param)


@few
@given(data=st.data())
def test_an_excerpt_gives_the_ids_of_the_whole(
    formats: tuple[str, tuple[ChatFormat, ChatFormat]], data: st.DataObject
) -> None:
    family, (short, whole) = formats
    conversation = draw_conversation(data, family, max_turns=8, call_rounds=9)
    history = list(conversation.start)
    for turn in conversation.turns:
        history.append(turn.answer)
        ids = sampled(family, turn)
        found = short.render_appended(history, ids, turn.new, TOOLS)
        assert found == whole.render_appended(history, ids, turn.new, TOOLS)
        history += turn.new
    assert short.num_wrong_excerpts == 0


def test_a_template_that_counts_messages_gets_whole_conversations():
    tokenizer = make_blank_tokenizer()
    tokenizer.chat_template = NUMBERED
    chat = ChatFormat(tokenizer, [1], reasoning="template", template_options={})
    assert not chat.allow_excerpts()


def count(history: Any, ids: Any, new: Any, tools: Any) -> str:
    """Follow as if the text depended on the number of messages from the 40th on."""
    return f"{len(history)}" if len(history) >= 40 else "few"


def long_talk(num_turns: int) -> list[Message]:
    talk: list[Message] = []
    for number in range(num_turns):
        talk.append({"role": "user", "content": f"q{number}"})
        talk.append({"role": "assistant", "content": f"a{number}"})
    return talk


def test_a_difference_is_found_and_ends_the_use_of_excerpts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(shortcut, "CHECK_EVERY", 3)
    chosen = Shortcut(count)
    assert chosen.open("{{ messages }}", TRIAL_TOOL)
    history = long_talk(20)
    assert make_excerpt(history, ()) is not None
    new: list[Message] = [{"role": "user", "content": "more"}]
    with caplog.at_level(logging.ERROR):
        found = [chosen.follow(history, (), new, ()) for _ in range(4)]
    assert found == ["few", "few", "40", "40"]
    assert chosen.num_wrong == 1
    assert "after 40 others as '40'" in caplog.text


def test_several_templates_by_name_get_whole_conversations():
    assert not Shortcut(count).open({"default": "{{ messages }}"}, TRIAL_TOOL)

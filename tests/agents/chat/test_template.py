"""Templates are rendered in the forms that they read."""

import copy
import json
from typing import Any

import pytest

from mcore_rl.agents.chat.template import ChatTemplate, RenderError, make_trial_call
from tests.support.chat_templates import FAMILIES, make_tokenizer
from tests.support.conversations import TOOLS

QUESTION = {"role": "user", "content": "hi"}


def answer(num_calls: int, **parts: Any) -> dict[str, Any]:
    calls = [make_trial_call(f"call0000{i}", f"value {i}") for i in range(num_calls)]
    return {"role": "assistant", "content": "", **({"tool_calls": calls} if calls else {}), **parts}


def render(family: str, *messages: Any, **options: Any) -> str:
    template = ChatTemplate(make_tokenizer(family), options)
    return template.render([QUESTION, *messages], TOOLS, generation_prompt=False)


NO_CALLS = {"llama3", "chatml", "mixtral", "deepseek_r1_distill"}


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - NO_CALLS))
def test_arguments_are_written_as_json(family: str) -> None:
    """They are neither encoded twice nor written as Python prints them."""
    text = render(family, answer(2))
    if family in ("glm4moe", "minimax_m2"):
        assert ">value 0<" in text
        assert ">value 1<" in text
    else:
        assert '{"x": "value 0"}' in text
        assert '{"x": "value 1"}' in text


@pytest.mark.parametrize("family", sorted(NO_CALLS))
def test_templates_without_calls(family: str) -> None:
    assert not ChatTemplate(make_tokenizer(family), {}).shows_calls


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_template_that_shows_tools_shows_those_of_a_conversation(family: str) -> None:
    shown = ChatTemplate(make_tokenizer(family), {}).shows_tools
    assert shown == (TOOLS[0]["function"]["description"] in render(family))
    assert shown == (family not in {*NO_CALLS, "deepseekv3"})


def test_reasoning_is_given_under_the_key_of_the_template() -> None:
    for family in ("qwen3", "glm4moe", "gptoss", "minimax_m2"):
        assert "because" in render(family, answer(1, reasoning_content="because"))


def test_gpt_oss_takes_either_text_or_reasoning_beside_a_call() -> None:
    text = render("gptoss", answer(1, reasoning_content="because", content="I look"))
    assert "I look" in text
    assert "because" not in text


def test_options_reach_the_template() -> None:
    template = ChatTemplate(make_tokenizer("qwen3"), {"enable_thinking": False})
    assert "<think>\n\n</think>" in template.render([QUESTION], (), generation_prompt=True)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - NO_CALLS))
@pytest.mark.parametrize("arguments", ["", " \n", None])
def test_empty_arguments_are_an_empty_object(family: str, arguments: Any) -> None:
    message = answer(1)
    message["tool_calls"][0]["function"]["arguments"] = arguments
    whole = copy.deepcopy(message)
    whole["tool_calls"][0]["function"]["arguments"] = "{}"
    assert render(family, message) == render(family, whole)


def test_arguments_that_are_no_object_are_given_as_they_are() -> None:
    message = answer(1)
    message["tool_calls"][0]["function"]["arguments"] = "not json"
    assert "not json" in render("qwen3", message)


def test_messages_are_left_as_they_were() -> None:
    message = answer(2, reasoning_content="because")
    before = copy.deepcopy(message)
    render("gptoss", message)
    assert message == before
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"x": "value 0"}


def test_a_refused_conversation_is_told_with_the_words_of_the_template() -> None:
    with pytest.raises(RenderError, match=r"2 messages \(user, user\).*must alternate"):
        render("mixtral", QUESTION)


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = copy.copy(make_tokenizer("qwen3"))
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template; episodes need one"):
        ChatTemplate(tokenizer, {})

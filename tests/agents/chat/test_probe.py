"""Rows fare as the probe of a template says."""

import pytest
from hypothesis import HealthCheck, given, settings

from mcore_rl.agents.chat.chat_format import ChatFormat, Reasoning
from mcore_rl.agents.chat.template import Case, RowOutcome
from tests.support.chat_templates import FAMILIES_BY_LANE, make_tokenizer, stop_ids
from tests.support.conversations import TOOLS, Conversation, Turn, conversations

APPENDS, FORKS, REFUSED = RowOutcome.APPENDS, RowOutcome.FORKS, RowOutcome.REFUSED
FORKING = {
    "qwen3": {Case.USER_AFTER_REASONING, Case.USER_AFTER_CALLS},
    "glm4moe": {Case.USER_AFTER_REASONING, Case.USER_AFTER_CALLS},
    "minimax_m2": {Case.USER_AFTER_REASONING, Case.USER_AFTER_CALLS},
    "gptoss": {Case.USER_AFTER_REASONING, Case.USER_AFTER_CALLS, Case.TOOL_AFTER_BOTH},
    "qwen2_5": {Case.USER_AFTER_REASONING, Case.TOOL_AFTER_REASONING, Case.TOOL_AFTER_BOTH},
}


def make_format(family: str, reasoning: Reasoning) -> ChatFormat:
    tokenizer = make_tokenizer(family)
    return ChatFormat(tokenizer, stop_ids(family), reasoning=reasoning, template_options={})


def case_of(turn: Turn) -> Case | None:
    """The case of an answer to the first question; None if none describes it."""
    reasoning = bool(turn.answer.get("reasoning_content"))
    content = bool(turn.answer["content"])
    num_calls = len(turn.answer.get("tool_calls", ()))
    if not num_calls:
        return Case.USER_AFTER_REASONING if reasoning else Case.USER
    if turn.new[-1]["role"] == "user":
        return None
    if num_calls > 1:
        return None if reasoning or content else Case.SEVERAL_CALLS
    if reasoning:
        return Case.TOOL_AFTER_BOTH if content else Case.TOOL_AFTER_REASONING
    return Case.TOOL_AFTER_TEXT if content else Case.TOOL


@settings(
    max_examples=settings().max_examples // 2,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@pytest.mark.parametrize("family", FAMILIES_BY_LANE)
@given(conversation=conversations(system=False, max_turns=1))
def test_the_probe_agrees_with_what_happens(family: str, conversation: Conversation) -> None:
    turn = conversation.turns[0]
    case = case_of(turn)
    if case is None:
        return
    history = [*conversation.start, turn.answer]
    for reasoning in ("template", "keep"):
        chat = make_format(family, reasoning)
        outcome = chat.probe().outcomes[case]
        if outcome is REFUSED:
            with pytest.raises(ValueError, match="cannot render"):
                chat.render_whole([*history, *turn.new], TOOLS)
        ids = chat.render_appended(history, (70,), turn.new, TOOLS)
        assert (ids is not None) == (outcome is APPENDS), (case, outcome)


@pytest.mark.parametrize("family", FORKING)
def test_families_that_fork(family: str) -> None:
    outcomes = make_format(family, "template").probe().outcomes
    assert {case for case, outcome in outcomes.items() if outcome is FORKS} == FORKING[family]
    assert REFUSED not in outcomes.values()
    kept = make_format(family, "keep").probe()
    assert set(kept.outcomes.values()) == {APPENDS}
    assert kept.lines == ()


def test_lines_name_the_case_and_the_remedy() -> None:
    assert make_format("qwen3", "template").probe().lines == (
        "user messages after reasoning start a new row: agents.reasoning=keep renders one row",
        "user messages after calls with reasoning start a new row: agents.reasoning=keep renders"
        " one row",
    )
    lines = make_format("deepseekv3", "keep").probe().lines
    assert lines == ("tool messages after a second round of calls start a new row",)
    assert "the chat template shows no tool calls" in make_format("chatml", "keep").probe().lines[0]
    refused = make_format("mixtral", "keep").probe()
    assert refused.outcomes[Case.TOOL] is REFUSED
    assert refused.outcomes[Case.USER] is APPENDS
    assert refused.lines[0].startswith("tool messages after a call: the chat template refuses")

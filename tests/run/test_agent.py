"""Episodes as they are format_episode, and wrong input of `mcore-rl agent run`."""

import random
from dataclasses import replace

import pytest

from mcore_rl.agents.chat.chat_format import ChatFormat
from mcore_rl.agents.turn_tree import rows_of
from mcore_rl.run.agent import (
    explain_hidden_tools,
    format_episode,
    refuse_broken_environment,
)
from mcore_rl.types import EpisodeRecord, Prompt, Sample, TurnRecord
from tests.support.chat_templates import make_tokenizer
from tests.support.turn_trees import random_tree, sample_of

PROMPT = Prompt(3, (1,), (), "sums", "93")


def test_an_episode_is_shown_turn_by_turn() -> None:
    question = {"role": "user", "content": "what is 1 + 2 ?"}
    call = {"function": {"name": "calculator", "arguments": '{"x": 1}'}, "id": "c", "type": "f"}
    asks = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}
    result = {"role": "tool", "content": "3", "tool_call_id": "c"}
    says = {"role": "assistant", "content": "3"}
    turns = (
        TurnRecord(0, None, "", (question,), asks, 5, "stop", 0.0, ("calculator: ok",)),
        TurnRecord(1, None, "template", (question, asks, result), says, 2, "stop", 1.0),
    )
    tree = random_tree(random.Random(0), 1)
    episode = EpisodeRecord(rows_of(tree), turns, "deadline", 1.0, "after 3 s")
    text = format_episode(replace(sample_of(tree, PROMPT, 0), episode=episode))
    assert text.splitlines() == [
        "=== prompt 3 of 'sums' ===",
        "[user] what is 1 + 2 ?",
        '[assistant] (hm) calculator {"x": 1}',
        "    call calculator: ok",
        "--- a new row: template ---",
        "[user] what is 1 + 2 ?",
        '[assistant] (hm) calculator {"x": 1}',
        "[tool] 3",
        "[assistant] 3",
        "    reward 1",
        "=== deadline (after 3 s): reward 1, 2 answers, 7 sampled tokens, 1 rows;"
        " ground truth '93' ===",
    ]


@pytest.mark.parametrize(("family", "hidden"), [("qwen3", set()), ("chatml", {"look", "add"})])
def test_tools_that_the_template_does_not_show_are_named(family: str, hidden: set[str]) -> None:
    chat_format = ChatFormat(make_tokenizer(family), (), reasoning="keep", template_options={})
    hello = [{"role": "user", "content": "hello"}]
    chat_format.render_whole(hello, ())
    assert chat_format.hidden_tools == set()
    tools = [{"type": "function", "function": {"name": name}} for name in ("look", "add")]
    chat_format.render_whole(hello, tools)
    assert chat_format.hidden_tools == hidden
    told = explain_hidden_tools("runs/a", ["add", "look"])
    assert told.startswith("warning: the chat template of model.path=runs/a shows no tools")
    assert "not told of add, look:" in told


def ended(*ends: str) -> list[Sample]:
    """Return a sample of an episode for each of these ends, told apart by its detail."""
    tree = random_tree(random.Random(0), 1)
    episodes = [
        EpisodeRecord(rows_of(tree), (), end, 0.0, f"why {i}") for i, end in enumerate(ends)
    ]
    return [replace(sample_of(tree, PROMPT, 0), episode=episode) for episode in episodes]


def test_an_environment_that_always_fails_ends_the_command_with_its_reasons() -> None:
    message = (
        r"^agents\.environment=sums\.py:Sums: all 2 episodes ended in env_error, so nothing was"
        r" learned of the policy: why 0; why 1$"
    )
    with pytest.raises(RuntimeError, match=message):
        refuse_broken_environment(ended("env_error", "env_error"), "sums.py:Sums")


@pytest.mark.parametrize("ends", [(), ("done",), ("env_error", "done"), ("deadline", "max_turns")])
def test_an_environment_that_works_once_is_shown(ends: tuple[str, ...]) -> None:
    refuse_broken_environment(ended(*ends), "sums.py:Sums")

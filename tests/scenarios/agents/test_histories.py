"""Histories that programs send, from the gateway to the chat template of every family."""

from typing import Any

import pytest

from mcore_rl.agents.chat.chat_format import ChatFormat
from mcore_rl.agents.chat.template import ChatTemplate
from mcore_rl.agents.messages import EndReason
from mcore_rl.agents.recorder import EpisodeLimits, EpisodeRecorder
from tests.support.chat_templates import FAMILIES, make_tokenizer, stop_ids
from tests.support.conversations import TOOLS
from tests.support.gateways import in_session, post
from tests.support.stand_in_policy import PlainParser, StandInPolicy

LIMITS = EpisodeLimits(max_turns=10, max_turn_len=50, max_tokens=10_000)
GO = {"role": "user", "content": "go"}

NO_CALLS = {"llama3", "chatml", "mixtral", "deepseek_r1_distill"}
WITH_CALLS = sorted(set(FAMILIES) - NO_CALLS)


def history(arguments: Any, **function: Any) -> list[dict[str, Any]]:
    """Return a conversation of a program's own, whose call has these arguments."""
    call = {"id": "call00000", "type": "function"}
    call |= {"function": {"name": "look", "arguments": arguments, **function}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [GO, answer, {"role": "tool", "tool_call_id": "call00000", "content": "seen"}]


def send(family: str, path: str, body: dict[str, Any]) -> tuple[int, Any, StandInPolicy]:
    """Return status and body of the gateway's answer, and the policy that was asked."""
    tokenizer: Any = make_tokenizer(family)
    policy = StandInPolicy(
        ["one"], lambda text: tokenizer.encode(text, add_special_tokens=False), stop_ids(family)[0]
    )
    chat = ChatFormat(tokenizer, stop_ids(family), reasoning="template", template_options={})
    recorder = EpisodeRecorder(chat, PlainParser(tokenizer.decode), policy, LIMITS)
    found: list[tuple[int, Any]] = []

    async def act(gateway: Any, session: Any) -> None:
        headers = {"Authorization": f"Bearer {session.key}"}
        found.append(await post(f"{gateway.url}/v1/{path}", body, headers))

    in_session(recorder, act)
    recorder.finish(EndReason.DONE)
    return *found[0], policy


@pytest.mark.parametrize("arguments", ["", "  \n", None])
@pytest.mark.parametrize("family", WITH_CALLS)
def test_empty_arguments_are_an_empty_object(family: str, arguments: Any) -> None:
    body = {"messages": history(arguments), "tools": TOOLS}
    status, answer, policy = send(family, "chat/completions", body)
    assert status == 200, answer
    whole = ChatTemplate(make_tokenizer(family), {}).render(history({}), TOOLS, True)
    encode = make_tokenizer(family).encode
    assert policy.asked[0].context_ids == tuple(encode(whole, add_special_tokens=False))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("[1]", r"must be an object of JSON, as templates want, not '[1]'"),
        ("3", r"must be an object of JSON, as templates want, not '3'"),
        ("null", r"must be an object of JSON, as templates want, not 'null'"),
        ("not json", r"must be an object of JSON, but 'not json' is no JSON: "),
        (7, r"must be a string of JSON, not int"),
        (False, r"must be a string of JSON, not bool"),
        ([], r"must be a string of JSON, not list"),
    ],
)
def test_other_arguments_are_refused_with_their_place(arguments: Any, reason: str) -> None:
    for family in ("qwen3", "glm4moe", "minimax_m2", "kimi_k2"):
        body = {"messages": history(arguments), "tools": TOOLS}
        status, answer, policy = send(family, "chat/completions", body)
        assert (status, policy.asked) == (400, [])
        message = answer["error"]["message"]
        assert message.startswith(f"messages[1].tool_calls[0].function.arguments: {reason}")


def test_the_responses_api_reads_arguments_alike() -> None:
    def items(arguments: Any) -> dict[str, Any]:
        call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": arguments}
        output = {"type": "function_call_output", "call_id": "c", "output": "seen"}
        return {"input": [GO, call, output]}

    assert send("glm4moe", "responses", items(""))[0] == 200
    status, answer, _ = send("glm4moe", "responses", items("[1]"))
    assert status == 400
    assert answer["error"]["message"].startswith("input[1].arguments: must be an object of JSON")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_a_conversation_that_ends_with_the_assistant_is_refused(family: str, path: str) -> None:
    name = "input" if path == "responses" else "messages"
    messages = [GO, {"role": "assistant", "content": "done"}]
    status, answer, policy = send(family, path, {name: messages, "max_tokens": 5})
    assert (status, policy.asked) == (400, [])
    assert "the last message must not be the assistant's" in answer["error"]["message"]
    assert answer["error"]["code"] == "invalid_messages"


def test_what_the_template_refuses_is_told_in_its_words() -> None:
    status, answer, policy = send("mixtral", "chat/completions", {"messages": [GO, GO]})
    assert (status, policy.asked) == (400, [])
    assert "must alternate" in answer["error"]["message"]

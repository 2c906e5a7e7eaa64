"""Responses become messages and calls; SGLang's real parsers run in a child process."""

import asyncio
import json
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcore_rl.agents.chat.answer_parser import AnswerParser
from mcore_rl.agents.messages import Answer, CallStatus
from tests.support.chat_templates import make_tokenizer, stop_ids
from tests.support.conversations import FREE_TEXT, TOOLS
from tests.support.sglang_parsers import ParserProcess
from tests.support.tool_calls import GOOD, LLAMA_CALL, harmony_call, qwen_call

OK, BAD, UNCLOSED = CallStatus.OK, CallStatus.BAD_JSON, CallStatus.UNCLOSED
UNKNOWN, IN_REASONING = CallStatus.UNKNOWN_TOOL, CallStatus.IN_REASONING


def parse(
    sglang: ParserProcess,
    family: str,
    text: str,
    tool_parser: str | None = "qwen25",
    reasoning_parser: str | None = None,
    finish_reason: str = "stop",
    tools: Any = TOOLS,
    stop: Sequence[str] = (),
) -> tuple[Answer, list[str]]:
    """Return the answer of the tokens of `text`, and the texts of its attempts' tokens."""
    tokenizer = make_tokenizer(family)
    ids = tokenizer.encode(text, add_special_tokens=False)
    numbers = count()
    parser = AnswerParser(
        tokenizer,
        stop_ids(family),
        sglang.ask,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        new_id=lambda: f"call_{next(numbers)}",
    )
    answer = asyncio.run(parser.parse(ids, tools, finish_reason, stop=stop))
    return answer, [tokenizer.decode(ids[a.start : a.stop]) for a in answer.attempts]


def statuses(answer: Answer) -> list[CallStatus]:
    return [attempt.status for attempt in answer.attempts]


def calls_of(answer: Answer) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in answer.message.get("tool_calls", ())]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@pytest.mark.parametrize("parser", GOOD)
def test_a_call_in_each_format(sglang: ParserProcess, parser: str) -> None:
    family, frame, call = GOOD[parser]
    answer, texts = parse(sglang, family, frame.format(call), parser)
    assert statuses(answer) == [OK]
    assert texts == [call]
    assert calls_of(answer) == [("look", {"x": "1"})]
    assert answer.message["content"] == "Hi"
    assert answer.attempts[0].call_id == answer.message["tool_calls"][0]["id"]


@pytest.mark.parametrize("parser", [name for name in GOOD if name != "mistral"])
def test_a_call_that_was_cut_off_is_not_executed(sglang: ParserProcess, parser: str) -> None:
    family, frame, call = GOOD[parser]
    text = frame.partition("{}")[0] + call[: call.index("look") + 6]
    answer, _ = parse(sglang, family, text, parser, finish_reason="length")
    assert statuses(answer) == [UNCLOSED]
    assert "tool_calls" not in answer.message
    assert "does not end with" in answer.attempts[0].error


@pytest.mark.parametrize("parser", GOOD)
def test_a_call_of_an_unknown_tool(sglang: ParserProcess, parser: str) -> None:
    family, frame, call = GOOD[parser]
    answer, _ = parse(sglang, family, frame.format(call.replace("look", "fly")), parser)
    assert statuses(answer) == [UNKNOWN]
    assert answer.attempts[0].name == "fly"
    assert answer.attempts[0].error == "There is no tool fly; the tools are: look, go."
    assert "tool_calls" not in answer.message
    assert "fly" in answer.message["content"]


def test_parallel_calls_and_failures_between_them(sglang: ParserProcess) -> None:
    good = qwen_call("look", '{ "x":"é🙂" }')
    bad = qwen_call("look", '{"x": }')
    answer, texts = parse(sglang, "qwen3", f"Hi\n{good}\n{bad}\n{qwen_call('go', '{}')}<|im_end|>")
    assert statuses(answer) == [OK, BAD, OK]
    assert texts == [good, bad, qwen_call("go", "{}")]
    assert calls_of(answer) == [("look", {"x": "é🙂"}), ("go", {})]
    assert [a.call_id for a in answer.attempts] == ["call_0", "", "call_1"]
    assert answer.attempts[1].error.startswith("The tool call is not valid JSON: ")
    assert answer.message["content"].split() == ["Hi", *bad.split()]


@pytest.mark.parametrize("body", ["5", "[1]", '{"name": 3}', '{"arguments": {}}'])
def test_json_that_is_no_call(sglang: ParserProcess, body: str) -> None:
    answer, _ = parse(sglang, "qwen3", f"<tool_call>\n{body}\n</tool_call><|im_end|>")
    assert statuses(answer) == [BAD]
    assert "does not have the form" in answer.attempts[0].error


def test_arguments_that_are_no_object(sglang: ParserProcess) -> None:
    answer, _ = parse(sglang, "qwen3", qwen_call("look", "[1]") + "<|im_end|>")
    assert statuses(answer) == [BAD]
    assert answer.attempts[0].error == "The arguments are not a JSON object."


def test_calls_in_the_reasoning_are_not_executed(sglang: ParserProcess) -> None:
    thought, call = qwen_call("look", '{"x": "1"}'), qwen_call("go", '{"x": "2"}')
    text = f"<think>\nfirst {thought}\n</think>\n\nHi\n{call}<|im_end|>"
    answer, texts = parse(sglang, "qwen3", text, reasoning_parser="qwen3")
    assert statuses(answer) == [IN_REASONING, OK]
    assert texts == [thought, call]
    assert calls_of(answer) == [("go", {"x": "2"})]
    assert answer.message["content"] == "Hi"
    assert answer.message["reasoning_content"] == f"\nfirst {thought}\n"


@pytest.mark.parametrize(
    ("family", "parser", "text", "reasoning", "content"),
    [
        ("qwen3", "qwen3", "<think>\nwhy\n</think>\n\nHi<|im_end|>", "\nwhy\n", "Hi"),
        ("qwen3", "qwen3", "<think></think>Hi<|im_end|>", None, "Hi"),
        ("qwen3", "qwen3", "Hi<|im_end|>", None, "Hi"),
        ("qwen3", "qwen3", "<think>\nwhy", "\nwhy", ""),
        ("qwen3", "qwen3-thinking", "why\n</think>\n\nHi<|im_end|>", "why\n", "Hi"),
        ("glm4moe", "glm45", "\n<think>why</think>\nHi<|user|>", "why", "Hi"),
        ("minimax_m2", "minimax", "why\n</think>\n\nHi[e~[", "why\n", "Hi"),
    ],
)
@pytest.mark.parametrize("tools", [(), TOOLS])
def test_reasoning(
    sglang: ParserProcess,
    family: str,
    parser: str,
    text: str,
    reasoning: str | None,
    content: str,
    tools: Any,
) -> None:
    answer, _ = parse(sglang, family, text, reasoning_parser=parser, tools=tools)
    assert answer.message.get("reasoning_content") == reasoning
    assert answer.message["content"] == content
    assert not answer.attempts


def test_channels_of_gpt_oss(sglang: ParserProcess) -> None:
    analysis = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
    call = harmony_call('{"x": "1"}')
    answer, texts = parse(sglang, "gptoss", analysis + call, "gpt-oss", "gpt-oss")
    assert (statuses(answer), texts) == ([OK], [call])
    assert calls_of(answer) == [("look", {"x": "1"})]
    assert answer.message["reasoning_content"] == "why"
    assert answer.message["content"] == ""

    final = analysis + "<|channel|>final<|message|>Hi<|return|>"
    answer, _ = parse(sglang, "gptoss", final, "gpt-oss", "gpt-oss")
    assert answer.message == {"role": "assistant", "content": "Hi", "reasoning_content": "why"}

    answer, _ = parse(sglang, "gptoss", analysis + harmony_call("{1}"), "gpt-oss", "gpt-oss")
    assert statuses(answer) == [BAD]


def test_gpt_oss_content_has_no_tokens_of_channels(sglang: ParserProcess) -> None:
    """SGLang takes no call whose recipient comes before the channel, and leaves it as text."""
    text = "<|channel|>analysis<|message|>why<|end|><|start|>assistant to=functions.look<|channel|>"
    text += 'commentary json<|message|>{"x": "1"}<|call|>'
    answer, _ = parse(sglang, "gptoss", text, "gpt-oss", "gpt-oss")
    assert statuses(answer) == [BAD]
    assert answer.attempts[0].name == "look"
    assert "<|" not in answer.message["content"]
    assert '{"x": "1"}' in answer.message["content"]


@pytest.mark.parametrize(
    ("text", "finish_reason", "status"),
    [
        (f"{LLAMA_CALL}<|eot_id|>", "stop", OK),
        (f"<|python_tag|>{LLAMA_CALL}<|eom_id|>", "stop", OK),
        ('{"name": "look", "par', "length", UNCLOSED),
        ('{"name": "look", "par<|eot_id|>', "stop", BAD),
        ('{"name": "fly", "parameters": {}}<|eot_id|>', "stop", UNKNOWN),
    ],
)
def test_calls_of_llama(
    sglang: ParserProcess, text: str, finish_reason: str, status: CallStatus
) -> None:
    answer, _ = parse(sglang, "llama3_1", text, "llama3", finish_reason=finish_reason)
    assert statuses(answer) == [status]
    assert calls_of(answer) == ([("look", {"x": "1"})] if status is OK else [])


def test_several_calls_in_one_text_share_its_tokens(sglang: ParserProcess) -> None:
    one, other = '{"name": "look", "arguments": {"x": "1"}}', '{"name": "go", "arguments": {}}'
    text = f"[TOOL_CALLS] [{one}, {other}]"
    answer, texts = parse(sglang, "mixtral", f"Hi {text}</s>", "mistral")
    assert calls_of(answer) == [("look", {"x": "1"}), ("go", {})]
    assert texts == [text, text]


def test_a_parser_whose_format_is_not_known_here(sglang: ParserProcess) -> None:
    answer, _ = parse(sglang, "qwen3", '[look(x="1"), go(x="2")]<|im_end|>', "pythonic")
    assert calls_of(answer) == [("look", {"x": "1"}), ("go", {"x": "2"})]
    answer, _ = parse(sglang, "qwen3", "just text<|im_end|>", "pythonic")
    assert answer == Answer({"role": "assistant", "content": "just text"})


def test_nothing_is_asked_without_tools_and_parsers(sglang: ParserProcess) -> None:
    call = qwen_call("look", "{}")
    answer, _ = parse(sglang, "qwen3", f"{call}<|im_end|>", tools=())
    assert answer == Answer({"role": "assistant", "content": call})
    parse(sglang, "qwen3", "Hi<|im_end|>", tool_parser=None)
    assert sglang.asked == []


@pytest.mark.parametrize(
    ("tool_parser", "reasoning_parser", "unknown"),
    [("no", None, "no"), (None, "none", "none"), ("qwen25", "qwen3", None), (None, None, None)],
)
def test_parsers_are_checked(
    sglang: ParserProcess, tool_parser: str | None, reasoning_parser: str | None, unknown: str
) -> None:
    parser = AnswerParser(
        make_tokenizer("qwen3"),
        stop_ids("qwen3"),
        sglang.ask,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
    )
    if unknown:
        with pytest.raises(ValueError, match=f"fails with the parser {unknown}: .*Unsupported"):
            asyncio.run(parser.check())
    else:
        asyncio.run(parser.check())
        assert len(sglang.asked) == (2 if tool_parser else 0)


@pytest.mark.parametrize(
    ("text", "stop", "content", "ended_by"),
    [
        ("Act\nObservation: sun", ["\nObservation:"], "Act", "\nObservation:"),
        ("one two three", ["three", "two", "no"], "one ", "two"),
        ("one two", ["two", "two"], "one ", "two"),
        ("stop at once", ["stop"], "", "stop"),
        ("it goes on<|im_end|>", ["off"], "it goes on", ""),
        ("ends<|im_end|>", ["<|im_end|>"], "ends", ""),
    ],
)
def test_a_message_ends_before_the_first_stop_text(
    sglang: ParserProcess, text: str, stop: list[str], content: str, ended_by: str
) -> None:
    answer, _ = parse(sglang, "qwen3", text, stop=stop)
    assert answer == Answer({"role": "assistant", "content": content}, (), ended_by)
    cut, _ = parse(sglang, "qwen3", text, finish_reason="length", stop=stop)
    assert cut.message["content"] == text.removesuffix("<|im_end|>") and not cut.stop_text


def test_reasoning_and_calls_end_before_a_stop_text(sglang: ParserProcess) -> None:
    thought = "<think>\nhm, STOP here"
    answer, _ = parse(sglang, "qwen3", thought, reasoning_parser="qwen3", stop=["STOP"])
    assert answer.message["reasoning_content"].strip() == "hm,"
    assert not answer.message["content"] and answer.stop_text == "STOP"
    call = qwen_call("look", '{"x": "1"}')
    answer, texts = parse(sglang, "qwen3", f"Look: {call}\nSTOP now", stop=["STOP"])
    assert calls_of(answer) == [("look", {"x": "1"})] and texts == [call]
    assert answer.message["content"] == "Look:"
    answer, _ = parse(sglang, "qwen3", f"{call[:30]}STOP", stop=["STOP"])
    assert statuses(answer) == [UNCLOSED]


def test_a_stop_text_that_ends_a_call_stays(sglang: ParserProcess) -> None:
    call = qwen_call("look", '{"x": "1"}')
    answer, texts = parse(sglang, "qwen3", f"{call}\n{call}", stop=["</tool_call>"])
    assert calls_of(answer) == [("look", {"x": "1"})] and texts == [call]
    answer, _ = parse(sglang, "qwen3", call, tools=(), stop=["</tool_call>"])
    assert answer.message["content"] == call.removesuffix("</tool_call>")


def test_an_empty_response(sglang: ParserProcess) -> None:
    for text in ("", "<|im_end|>"):
        answer, _ = parse(sglang, "qwen3", text, reasoning_parser="qwen3")
        assert answer == Answer({"role": "assistant", "content": ""})


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(FREE_TEXT, max_size=4),
    indent=st.none() | st.integers(0, 3),
    content=FREE_TEXT,
    ascii_only=st.booleans(),
)
def test_calls_are_found_however_their_json_is_written(
    sglang: ParserProcess, texts: list[str], indent: int | None, content: str, ascii_only: bool
) -> None:
    calls = [
        json.dumps(
            {"name": "look", "arguments": {"x": text}}, indent=indent, ensure_ascii=ascii_only
        )
        for text in texts
    ]
    written = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    answer, found = parse(sglang, "qwen3", "\n".join([content, *written]) + "<|im_end|>")
    assert found == written
    assert calls_of(answer) == [("look", {"x": text}) for text in texts]
    ids = [call["id"] for call in answer.message.get("tool_calls", ())]
    assert len(set(ids)) == len(texts)
    assert answer.message["content"].strip() == content.strip()

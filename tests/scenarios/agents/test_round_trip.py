"""Sampled text becomes a message by SGLang's parsers, and the row goes on after its tokens."""

import asyncio

import pytest

from mcore_rl.agents.chat.answer_parser import AnswerParser
from mcore_rl.agents.chat.chat_format import ChatFormat
from mcore_rl.agents.messages import Message
from tests.support.chat_templates import make_tokenizer, stop_ids
from tests.support.conversations import TOOLS
from tests.support.sglang_parsers import ParserProcess
from tests.support.tool_calls import GOOD, harmony_call

HARMONY_THOUGHT = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
RESPONSES = {
    "qwen3": (
        "qwen25",
        "qwen3",
        '<think>\nwhy  \n</think>\n<tool_call>\n{ "name":"look",\n"arguments":{"x":"\\u00e9"}}'
        "\n</tool_call>  <|im_end|>",
    ),
    "glm4moe": ("glm45", "glm45", "\n<think>why</think>" + GOOD["glm45"][2] + "<|observation|>"),
    "minimax_m2": (
        "minimax-m2",
        "minimax",
        "why</think>" + GOOD["minimax-m2"][1].format(GOOD["minimax-m2"][2]),
    ),
    "gptoss": ("gpt-oss", "gpt-oss", HARMONY_THOUGHT + harmony_call('{ "x":"1"}')),
    "kimi_k2": ("kimi_k2", None, GOOD["kimi_k2"][1].format(GOOD["kimi_k2"][2])),
    "qwen2_5": ("hermes", None, "Hi " + GOOD["hermes"][2] + "<|im_end|>"),
}


@pytest.mark.parametrize("family", RESPONSES)
def test_three_rounds_of_calls_are_one_row(sglang: ParserProcess, family: str) -> None:
    tool_parser, reasoning_parser, response = RESPONSES[family]
    tokenizer = make_tokenizer(family)
    parser = AnswerParser(
        tokenizer,
        stop_ids(family),
        sglang.ask,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
    )
    chat = ChatFormat(tokenizer, stop_ids(family), reasoning="template", template_options={})
    sampled = tuple(tokenizer.encode(response, add_special_tokens=False))
    history: list[Message] = [{"role": "user", "content": "hi"}]
    row = chat.render_whole(history, TOOLS)
    taken: set[str] = set()
    for number in range(3):
        answer = asyncio.run(parser.parse(sampled, TOOLS, "stop", taken))
        (call,) = answer.message["tool_calls"]
        assert call["id"] not in taken
        taken.add(call["id"])
        history.append(answer.message)
        result = {"role": "tool", "tool_call_id": call["id"], "content": f"result {number}"}
        ids = chat.render_appended(history, sampled, [result], TOOLS)
        assert ids is not None
        row += sampled + ids
        history.append(result)
    text = tokenizer.decode(row)
    parts = text.split(response)
    assert len(parts) == 4
    assert all(f"result {number}" in part for number, part in enumerate(parts[1:]))
    assert all(part.endswith(chat.generation_prompt) for part in parts)
    again = tokenizer.decode(chat.render_whole(history, TOOLS))
    assert "result 2" in again

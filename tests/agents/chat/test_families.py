"""Parsers of model families."""

import asyncio

import pytest

from mcore_rl.agents.chat.setup import PARSERS, Parsers, resolve_parsers
from mcore_rl.agents.chat.tool_syntax import SYNTAXES
from tests.support.chat_templates import FAMILIES, template_of
from tests.support.conversations import TOOLS
from tests.support.sglang_parsers import ParserProcess


@pytest.mark.parametrize(
    ("architecture", "family", "prompt", "tool", "reasoning"),
    [
        ("Qwen3MoeForCausalLM", "qwen3", "assistant\n", "qwen25", "qwen3"),
        ("Qwen3MoeForCausalLM", "qwen3", "assistant\n<think>\n", "qwen25", "qwen3-thinking"),
        ("Qwen2ForCausalLM", "qwen2_5", "assistant\n", "qwen25", None),
        ("Qwen2ForCausalLM", "qwen2_5", "<think>\n", "qwen25", "deepseek-r1"),
        ("MixtralForCausalLM", "mixtral", "", "mistral", None),
        ("Glm4MoeForCausalLM", "glm4moe", "<|assistant|>", "glm45", "glm45"),
        ("MiniMaxM2ForCausalLM", "minimax_m2", "]~b]ai\n<think>\n", "minimax-m2", "minimax"),
        ("GptOssForCausalLM", "gptoss", "<|start|>assistant", "gpt-oss", "gpt-oss"),
        ("DeepseekV3ForCausalLM", "deepseekv3", "<think>\n", "deepseekv3", "deepseek-r1"),
        ("DeepseekV3ForCausalLM", "deepseekv3", "", "deepseekv3", None),
        ("DeepseekV3ForCausalLM", "kimi_k2", "", "kimi_k2", None),
        ("LlamaForCausalLM", "llama3_1", "", "llama3", None),
        ("LlamaForCausalLM", "chatml", "", None, None),
    ],
)
def test_auto(
    architecture: str, family: str, prompt: str, tool: str | None, reasoning: str | None
) -> None:
    template = template_of(FAMILIES[family])
    resolved = resolve_parsers("auto", "auto", architecture, template, prompt)
    assert resolved == Parsers(tool, reasoning)


def test_templates_tell_models_of_an_architecture_apart() -> None:
    resolved = resolve_parsers("auto", "none", "Qwen3MoeForCausalLM", "<function=name>", "")
    assert resolved == Parsers("qwen3_coder", None)
    resolved = resolve_parsers("auto", "none", "DeepseekV3ForCausalLM", "no fences", "")
    assert resolved == Parsers("deepseekv31", None)


def test_names_are_taken_as_they_are() -> None:
    assert resolve_parsers("hermes", "none", "Unknown", "", "<think>") == Parsers("hermes", None)


def test_auto_of_an_unknown_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no parsers are known for Unknown"):
        resolve_parsers("auto", "none", "Unknown", "", "")


def test_every_parser_exists_in_sglang(sglang: ParserProcess) -> None:
    for tool in {*SYNTAXES, *(parsers.tool for parsers in PARSERS.values())} - {None}:
        body = {"text": "Hi", "tools": TOOLS, "tool_call_parser": tool}
        assert asyncio.run(sglang.ask("/parse_function_call", body))["calls"] == []
    others = {"deepseek-r1", "qwen3-thinking", "kimi_k2"}
    for reasoning in {*others, *(parsers.reasoning for parsers in PARSERS.values())} - {None}:
        body = {"text": "Hi", "reasoning_parser": reasoning}
        assert set(asyncio.run(sglang.ask("/separate_reasoning", body))) == {
            "reasoning_text",
            "text",
        }
    with pytest.raises(ValueError, match="Unsupported"):
        asyncio.run(sglang.ask("/separate_reasoning", {"text": "", "reasoning_parser": "no"}))

"""Format and parser follow the recipe, and the model's architecture where it says auto."""

import pytest

from mcore_rl.agents.chat.setup import make_format_and_parser
from mcore_rl.config import AgentsConfig
from tests.support.chat_templates import make_tokenizer, stop_ids
from tests.support.sglang_parsers import ParserProcess


def test_reasoning_is_kept_if_the_recipe_says_so(sglang: ParserProcess) -> None:
    for reasoning in ("template", "keep"):
        agents = AgentsConfig(environment="tools", reasoning=reasoning)
        made, _ = make_format_and_parser(
            make_tokenizer("qwen3"), stop_ids("qwen3"), "Qwen3MoeForCausalLM", agents, sglang.ask
        )
        history = [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "x", "reasoning_content": "why"},
        ]
        new = [{"role": "user", "content": "on"}]
        appended = made.render_appended(history, (70, stop_ids("qwen3")[0]), new, ())
        assert (appended is None) == (reasoning == "template")


def test_a_model_without_known_parsers_is_refused(sglang: ParserProcess) -> None:
    agents = AgentsConfig(environment="tools")
    with pytest.raises(ValueError, match="no parsers are known for MysteryForCausalLM"):
        make_format_and_parser(
            make_tokenizer("qwen3"), stop_ids("qwen3"), "MysteryForCausalLM", agents, sglang.ask
        )

"""Makes the format and the parser of a model's conversations, as its files and a recipe say.

Which of SGLang's parsers belong to which models.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from mcore_rl.agents.chat.answer_parser import AnswerParser, Ask
from mcore_rl.agents.chat.chat_format import ChatFormat
from mcore_rl.config import AgentsConfig

AUTO = "auto"
NONE = "none"


@dataclass(frozen=True)
class Parsers:
    """SGLang's names of parsers; None: the model has no tool calls, or no reasoning, of its own."""

    tool: str | None = None
    reasoning: str | None = None


QWEN3 = Parsers("qwen25", "qwen3")
QWEN2 = Parsers("qwen25")
PARSERS: Mapping[str, Parsers] = {
    "Qwen3MoeForCausalLM": QWEN3,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen2MoeForCausalLM": QWEN2,
    "Qwen2ForCausalLM": QWEN2,
    "MixtralForCausalLM": Parsers("mistral"),
    "OlmoeForCausalLM": Parsers(),
    "Glm4MoeForCausalLM": Parsers("glm45", "glm45"),
    "MiniMaxM2ForCausalLM": Parsers("minimax-m2", "minimax"),
    "GptOssForCausalLM": Parsers("gpt-oss", "gpt-oss"),
    "DeepseekV3ForCausalLM": Parsers("deepseekv3"),
    "DeepseekV2ForCausalLM": Parsers(),
    "LlamaForCausalLM": Parsers("llama3"),
}
"""By `architectures` of config.json. Several models share one; their templates tell them apart."""


def resolve_parsers(
    tool: str, reasoning: str, architecture: str, template: str, generation_prompt: str
) -> Parsers:
    """Return the parsers of a model; `tool` and `reasoning` are SGLang's names, auto or none.

    template            text of the model's chat template
    generation_prompt   text that begins the assistant's turn; if it ends with <think>, responses
                        begin within the reasoning

    Raises ValueError if auto is asked for a model that the table does not have.
    """
    if AUTO in (tool, reasoning) and architecture not in PARSERS:
        raise ValueError(
            f"no parsers are known for {architecture}, so auto cannot choose; name SGLang's tool"
            f" call parser and reasoning parser, or {NONE}"
        )
    known = PARSERS.get(architecture, Parsers())
    chosen_tool = _tool(known.tool, architecture, template) if tool == AUTO else tool
    if reasoning == AUTO:
        chosen_reasoning = _choose_reasoning(known.reasoning, template, generation_prompt)
    else:
        chosen_reasoning = reasoning
    return Parsers(_find_named(chosen_tool), _find_named(chosen_reasoning))


def _tool(tool: str | None, architecture: str, template: str) -> str | None:
    if "<|tool_calls_section_begin|>" in template or "<|im_middle|>" in template:
        return "kimi_k2"
    if "<function=" in template:
        return "qwen3_coder"
    if architecture == "LlamaForCausalLM" and "<|start_header_id|>" not in template:
        return None
    if tool == "deepseekv3" and "```json" not in template:
        return "deepseekv31"
    return tool


def _choose_reasoning(reasoning: str | None, template: str, generation_prompt: str) -> str | None:
    if "<|im_middle|>" in template:
        return "kimi_k2" if "think" in template else None
    if not generation_prompt.rstrip().endswith("<think>"):
        return reasoning
    return {None: "deepseek-r1", "qwen3": "qwen3-thinking"}.get(reasoning, reasoning)


def _find_named(parser: str | None) -> str | None:
    return None if parser == NONE else parser


_log = logging.getLogger(__name__)


def make_format_and_parser(
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
    architecture: str,
    agents: AgentsConfig,
    ask: Ask,
    *,
    excerpts: bool = True,
) -> tuple[ChatFormat, AnswerParser]:
    """Return both, and log what the template does to rows.

    `excerpts`: False where the template may count what an excerpt leaves out, such as images.

    Raises ValueError if there is no chat template, or no parser is known for the model.
    """
    chat_format = ChatFormat(
        tokenizer,
        stop_token_ids,
        reasoning="keep" if agents.reasoning == "keep" else "template",
        template_options=agents.template,
    )
    if excerpts and not chat_format.allow_excerpts():
        _log.info("the chat template is given whole conversations: excerpts would change the text")
    parsers = resolve_parsers(
        agents.tool_parser,
        agents.reasoning_parser,
        architecture,
        str(tokenizer.chat_template),
        chat_format.generation_prompt,
    )
    parser = AnswerParser(
        tokenizer,
        stop_token_ids,
        ask,
        tool_parser=parsers.tool,
        reasoning_parser=parsers.reasoning,
    )
    return chat_format, parser

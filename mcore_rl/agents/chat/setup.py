"""Makes the format and the parser of a model's conversations, as its files and a recipe say."""

import logging
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from mcore_rl.agents.chat.answer_parser import AnswerParser, Ask
from mcore_rl.agents.chat.chat_format import ChatFormat
from mcore_rl.agents.chat.families import resolve_parsers
from mcore_rl.config import AgentsConfig

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

"""Tokenizers with the chat templates of model families, for tests of the agents' token ids.

The templates come from the package trl, where it has them. The others are written here, as the
models' documentation shows their turns.
"""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AddedToken, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MIXTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
KIMI = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}<|im_user|>user<|im_middle|>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>{{ m.content }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}"
    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}"
    "{% elif m.role == 'tool' %}<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n"
    "{{ m.content }}{% else %}<|im_system|>system<|im_middle|>{{ m.content }}{% endif %}"
    "<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
MINIMAX = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "]~!b[]~b]system\nYou help.{% if tools %}{{ tools | tojson }}{% endif %}[e~[\n"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "]~b]tool{% endif %}\n<response>{{ m.content }}</response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}[e~[\n{% endif %}"
    "{% elif m.role == 'assistant' %}]~b]ai\n"
    "{% if m.reasoning_content and loop.index0 > ns.last %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}\n<minimax:tool_call>\n{% for c in m.tool_calls %}"
    '<invoke name="{{ c.function.name }}">\n{% for k, v in c.function.arguments.items() %}'
    '<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}'
    "</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}[e~[\n"
    "{% else %}]~b]{{ m.role }}\n{{ m.content }}[e~[\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}]~b]ai\n<think>\n{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A chat template and its tokens.

    template   a file of trl, or the text of a template
    stops      tokens that end a response
    special    further special tokens
    plain      added tokens that are not special: markers that decoding keeps
    """

    template: str
    stops: tuple[str, ...]
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    bos: str | None = None


TOOL_PARTS = ("calls", "call", "outputs", "output")
QWEN = Family(
    "qwen3.jinja",
    ("<|im_end|>", "<|endoftext|>"),
    ("<|im_start|>",),
    ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)


def deepseek(words: str) -> str:
    """Return DeepSeek's token of these words, with its wide bars and low lines."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


DEEPSEEK = Family(
    "deepseekv3.jinja",
    (deepseek("end of sentence"),),
    (deepseek("User"), deepseek("Assistant")),
    (
        "<think>",
        "</think>",
        deepseek("tool sep"),
        *(deepseek(f"tool {what} {end}") for what in TOOL_PARTS for end in ("begin", "end")),
    ),
    deepseek("begin of sentence"),
)
LLAMA = Family(
    "llama3_1.jinja",
    ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    ("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    bos="<|begin_of_text|>",
)
FAMILIES = {
    "qwen3": QWEN,
    "qwen3_instruct_2507": Family(
        "qwen3_instruct_2507.jinja", QWEN.stops, QWEN.special, QWEN.plain
    ),
    "qwen2_5": Family("qwen2_5.jinja", QWEN.stops, QWEN.special, QWEN.plain),
    "deepseekv3": DEEPSEEK,
    "deepseek_r1_distill": Family(
        "deepseek_r1_distill.jinja", DEEPSEEK.stops, DEEPSEEK.special, DEEPSEEK.plain, DEEPSEEK.bos
    ),
    "glm4moe": Family(
        "glm4moe.jinja",
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>"),
        (*QWEN.plain, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "gptoss": Family(
        "gptoss.jinja",
        ("<|return|>", "<|call|>"),
        ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>"),
    ),
    "llama3": Family("llama3.jinja", LLAMA.stops, LLAMA.special, bos=LLAMA.bos),
    "llama3_1": LLAMA,
    "llama3_2": Family("llama3_2.jinja", LLAMA.stops, LLAMA.special, bos=LLAMA.bos),
    "chatml": Family(CHATML, QWEN.stops, QWEN.special),
    "mixtral": Family(MIXTRAL, ("</s>",), bos="<s>"),
    "kimi_k2": Family(
        KIMI,
        ("<|im_end|>",),
        ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
        (
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
    ),
    "minimax_m2": Family(
        MINIMAX,
        ("[e~[",),
        ("]~!b[", "]~b]"),
        ("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"),
    ),
}
QUICK = ("qwen3", "deepseekv3", "glm4moe", "gptoss", "mixtral")
"""Families of `make test`: they end turns, write calls and show reasoning in different ways."""
FAMILIES_BY_LANE = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAMILIES
]
"""Parameters for a test of every family."""
TEXT = ["the weather of the city", '{"name": "look", "arguments": {"x": 1}}', "assistant\n\nuser\n"]
"""The merges are learned from it, so that some tokens are longer than a byte."""


def template_of(family: Family) -> str:
    """Return the text of the family's chat template."""
    if not family.template.endswith(".jinja"):
        return family.template
    spec = find_spec("trl")  # read as data: its code is not imported
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    return (folder / "chat_templates" / family.template).read_text()


@cache
def make_tokenizer(name: str) -> Any:
    """Return a tokenizer of bytes and some merges, with the family's tokens and template."""
    family = FAMILIES[name]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=family.stops[0],
        clean_up_tokenization_spaces=False,
        **({"bos_token": family.bos} if family.bos else {}),
    )
    for text in (*family.stops, *family.special):
        fast.add_tokens(AddedToken(text, special=True), special_tokens=True)
    for text in family.plain:
        fast.add_tokens(AddedToken(text, special=False))
    fast.chat_template = template_of(family)
    return fast


def stop_ids(name: str) -> list[int]:
    """Return the ids of the family's stop tokens."""
    return make_tokenizer(name).convert_tokens_to_ids(list(FAMILIES[name].stops))

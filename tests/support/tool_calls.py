"""Tool calls in the formats of SGLang's parsers."""

from tests.support.chat_templates import deepseek


def qwen_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def deepseek_call(name: str, arguments: str) -> str:
    kind = f"{deepseek('tool call begin')}function{deepseek('tool sep')}"
    return f"{kind}{name}\n```json\n{arguments}\n```{deepseek('tool call end')}"


def kimi_call(name: str, number: int) -> str:
    return (
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
        '{"x": "1"}<|tool_call_end|>'
    )


def harmony_call(arguments: str) -> str:
    head = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
    return f"{head}{arguments}<|call|>"


GLM_CALL = "<tool_call>look\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
CODER_CALL = (
    "<tool_call>\n<function=look>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
)
MINIMAX_CALL = '<invoke name="look">\n<parameter name="x">1</parameter>\n</invoke>'
LLAMA_CALL = '{"name": "look", "parameters": {"x": "1"}}'
HERMES_CALL = '<tool_call>{"name": "look", "arguments": {"x": "1"}}</tool_call>'
MISTRAL_CALL = '[TOOL_CALLS] [{"name": "look", "arguments": {"x": "1"}}]'
GOOD: dict[str, tuple[str, str, str]] = {
    "qwen25": ("qwen3", "Hi\n{}<|im_end|>", qwen_call("look", '{"x": "1"}')),
    "hermes": ("qwen3", "Hi\n{}<|im_end|>", HERMES_CALL),
    "qwen3_coder": ("qwen3", "Hi\n{}<|im_end|>", CODER_CALL),
    "glm45": ("glm4moe", "Hi\n{}<|observation|>", GLM_CALL),
    "deepseekv3": (
        "deepseekv3",
        f"Hi{deepseek('tool calls begin')}{{}}{deepseek('tool calls end')}"
        + deepseek("end of sentence"),
        deepseek_call("look", '{"x": "1"}'),
    ),
    "deepseekv31": (
        "deepseekv3",
        f"Hi{deepseek('tool calls begin')}{{}}{deepseek('tool calls end')}"
        + deepseek("end of sentence"),
        f"{deepseek('tool call begin')}look{deepseek('tool sep')}"
        f'{{"x": "1"}}{deepseek("tool call end")}',
    ),
    "kimi_k2": (
        "kimi_k2",
        "Hi<|tool_calls_section_begin|>{}<|tool_calls_section_end|><|im_end|>",
        kimi_call("look", 0),
    ),
    "minimax-m2": (
        "minimax_m2",
        "Hi\n<minimax:tool_call>\n{}\n</minimax:tool_call>[e~[",
        MINIMAX_CALL,
    ),
    "mistral": ("mixtral", "Hi {}</s>", MISTRAL_CALL),
}
"""By parser: a family, the rest of a response around {}, and a call of look with x="1"."""

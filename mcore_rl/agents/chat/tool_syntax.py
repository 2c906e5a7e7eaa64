"""How the formats of tool calls look, by the names of SGLang's parsers.

SGLang's parser decides what is a call. This table finds the texts to ask it about, and explains
why one is none.

Ids of tool calls, each unique in an episode.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.agents.messages import CallStatus

KIMI_ID = re.compile(r"<\|tool_call_begin\|>\s*([\w.\-]+:\d+)\s*<")


class CallIds:
    """Makes the ids of a response's calls."""

    def __init__(self, tool_parser: str, new_id: Callable[[], str], taken: Collection[str]) -> None:
        """`taken`: ids of earlier calls in the episode."""
        self._is_kimi = tool_parser == "kimi_k2"
        self._new_id = new_id
        self._taken = set(taken)

    def make(self, name: str, written: str) -> str:
        """Return the id of a call of the tool `name`, whose text is `written`.

        Kimi writes ids itself, functions.NAME:NUMBER, and reads them in tool messages. Its own id
        is taken unless an earlier call has it.
        """
        call_id = self._kimi_id(name, written) if self._is_kimi else self._new_id()
        self._taken.add(call_id)
        return call_id

    def _kimi_id(self, name: str, written: str) -> str:
        match = KIMI_ID.search(written)
        if match and match[1] not in self._taken:
            return match[1]
        number = len(self._taken)
        while (call_id := f"functions.{name}:{number}") in self._taken:
            number += 1
        return call_id


@dataclass(frozen=True)
class ToolSyntax:
    """The text of a call.

    start    pattern of its beginning
    end      its end; empty: all further text belongs to calls
    before   what SGLang's parser expects in front of calls, once for all of them
    after    what ends all calls
    name     pattern of a call, whose group is the tool's name
    is_json  the text between start and end is an object with the name and the arguments
    shape    what a call should look like, in words for the policy
    """

    start: str
    end: str
    name: str
    shape: str
    before: str = ""
    after: str = ""
    is_json: bool = False


@dataclass(frozen=True)
class Written:
    """The text of a call, or of a try, at [start, stop) of a response."""

    start: int
    stop: int
    text: str
    closed: bool


def _deepseek(words: str) -> str:
    """Return DeepSeek's token of these words, with its wide bars and low lines."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


JSON_NAME = r'"name"\s*:\s*"([^"]*)"'
QWEN = ToolSyntax(
    start="<tool_call>",
    end="</tool_call>",
    name=JSON_NAME,
    shape='<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>',
    is_json=True,
)
GLM = ToolSyntax(
    start="<tool_call>",
    end="</tool_call>",
    name=r"<tool_call>\s*([^\s<]+)",
    shape="<tool_call>NAME\n<arg_key>...</arg_key>\n<arg_value>...</arg_value>\n</tool_call>",
)
SEP = _deepseek("tool sep")
DEEPSEEK_V31 = ToolSyntax(
    start=_deepseek("tool call begin"),
    end=_deepseek("tool call end"),
    before=_deepseek("tool calls begin"),
    after=_deepseek("tool calls end"),
    name=_deepseek("tool call begin") + r"\s*(\S*?)\s*" + SEP,
    shape=f"{_deepseek('tool call begin')}NAME{SEP}{{...}}{_deepseek('tool call end')}",
)
DEEPSEEK_V3 = ToolSyntax(
    start=DEEPSEEK_V31.start,
    end=DEEPSEEK_V31.end,
    before=DEEPSEEK_V31.before,
    after=DEEPSEEK_V31.after,
    name=SEP + r"\s*(\S+)\s*\n",
    shape=f"{DEEPSEEK_V31.start}function{SEP}NAME\n```json\n{{...}}\n```{DEEPSEEK_V31.end}",
)
SYNTAXES: Mapping[str, ToolSyntax] = {
    "qwen": QWEN,
    "qwen25": QWEN,
    "hermes": QWEN,
    "qwen3_coder": ToolSyntax(
        start="<tool_call>",
        end="</tool_call>",
        name=r"<function=([^>\s]*)>",
        shape="<tool_call>\n<function=NAME>\n<parameter=KEY>\n...\n</parameter>\n</function>\n"
        "</tool_call>",
    ),
    "glm": GLM,
    "glm45": GLM,
    "glm47": GLM,
    "deepseekv3": DEEPSEEK_V3,
    "deepseekv31": DEEPSEEK_V31,
    "kimi_k2": ToolSyntax(
        start=re.escape("<|tool_call_begin|>"),
        end="<|tool_call_end|>",
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
        name=r"<\|tool_call_begin\|>\s*(?:functions\.)?([\w.\-]+?)(?::\d+)?\s*<\|tool_call_arg",
        shape="<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}"
        "<|tool_call_end|>",
    ),
    "minimax-m2": ToolSyntax(
        start='<invoke name="',
        end="</invoke>",
        before="<minimax:tool_call>",
        after="</minimax:tool_call>",
        name=r'<invoke name="([^"]*)"',
        shape='<invoke name="NAME">\n<parameter name="KEY">...</parameter>\n</invoke>',
    ),
    "gpt-oss": ToolSyntax(
        start=r"<\|channel\|>commentary to=|(?:\A|(?<=<\|start\|>assistant)) to=",
        end="<|call|>",
        before="<|start|>assistant",
        name=r"to=(?:functions\.)?([\w.\-]+)",
        shape="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>",
    ),
    "mistral": ToolSyntax(
        start=r"\[TOOL_CALLS\]",
        end="",
        name=rf"{JSON_NAME}|\[TOOL_CALLS\]\s*([\w.\-]+)",
        shape='[TOOL_CALLS] [{"name": ..., "arguments": {...}}]',
    ),
    "llama3": ToolSyntax(
        start=r'<\|python_tag\|>|\A(?=\{\s*"name")',
        end="",
        name=JSON_NAME,
        shape='{"name": ..., "parameters": {...}}',
    ),
}


def find_written(syntax: ToolSyntax, text: str, start: int = 0) -> list[Written]:
    """Return the calls that are written, or begun, in text[start:]."""
    found = []
    pattern = re.compile(syntax.start)
    rest = text[start:]
    position = 0
    while match := pattern.search(rest, position):
        end = rest.find(syntax.end, match.end()) if syntax.end else len(rest)
        stop = len(rest) if end < 0 else end + len(syntax.end)
        written = rest[match.start() : stop]
        found.append(Written(start + match.start(), start + stop, written, closed=end >= 0))
        position = stop
    return found


def is_malformed(syntax: ToolSyntax, written: Written) -> bool:
    """Return whether it is JSON that is no call: SGLang's parsers fail on some of it."""
    try:
        value = json.loads(_body(syntax, written))
    except ValueError:
        return False
    calls = value if isinstance(value, list) else [value]
    return not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls)


def explain(
    syntax: ToolSyntax, written: Written, names: Sequence[str]
) -> tuple[CallStatus, str, str]:
    """Return why the text is no call: the status, the name of the tool, and words for the policy.

    `names`: the tools there are.
    """
    if not written.closed:
        end = f"does not end with {syntax.end}" if syntax.end else "was cut off"
        return CallStatus.UNCLOSED, "", f"The tool call {end}."
    match = re.search(syntax.name, written.text)
    name = next((group for group in match.groups() if group), "") if match else ""
    if name and name not in names:
        return CallStatus.UNKNOWN_TOOL, name, describe_unknown_tool(name, names)
    error = f"The tool call does not have the form {syntax.shape}"
    if syntax.is_json:
        try:
            json.loads(_body(syntax, written))
        except ValueError as bad:
            error = f"The tool call is not valid JSON: {bad}"
    return CallStatus.BAD_JSON, name, error


def describe_unknown_tool(name: str, names: Sequence[str]) -> str:
    """Return words for the policy about a tool that does not exist."""
    return f"There is no tool {name}; the tools are: {', '.join(names) or 'none'}."


def describe_arguments_error(arguments: str) -> str:
    """Return what is wrong with the arguments of a call; empty if they are a JSON object."""
    try:
        value: Any = json.loads(arguments)
    except ValueError as error:
        return f"The arguments are not valid JSON: {error}"
    return "" if isinstance(value, dict) else "The arguments are not a JSON object."


def _body(syntax: ToolSyntax, written: Written) -> str:
    match = re.match(syntax.start, written.text)
    body = written.text[match.end() if match else 0 :]
    return (body.removesuffix(syntax.end) if syntax.end else body).strip()

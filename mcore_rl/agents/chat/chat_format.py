"""From messages to token ids: of a whole conversation, and of what is appended to a sampled answer.

row:  | render_whole(messages) | sampled answer | render_appended(...) | sampled answer | ...
                                           end of the answer's turn, new messages, prompt

Sampled ids are never decoded and encoded again: only the text after them is tokenized.

Marks in an answer, by which its parts are found in a rendered conversation.

Finds where an answer's turn ends in a rendered conversation, and what follows it.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from mcore_rl.agents.chat.shortcut import Shortcut
from mcore_rl.agents.chat.template import (
    TRIAL_TOOL,
    ChatTemplate,
    RenderError,
    TemplateBehavior,
    probe_format,
)
from mcore_rl.agents.messages import Message, Tool

END_OF_REASONING = "</think>"


def find_unused_mark(messages: Sequence[Message]) -> str:
    """Return letters and digits that occur nowhere in the messages."""
    text = json.dumps([dict(message) for message in messages], default=str)
    number = 0
    while (mark := f"qX{number}mark") in text:
        number += 1
    return mark


def mark_answer(message: Message, mark: str) -> tuple[dict[str, Any], list[str]]:
    """Return the answer with a mark in each part that it has, and the marks.

    Parts are the reasoning, the content and the calls. The mark ends the reasoning and the content,
    and replaces a call's arguments. An answer without content and calls gets a mark as content.
    Reasoning that was left in the content, up to </think>, gets a mark of its own.
    """
    marked = dict(message)
    marks = []

    def put(name: str) -> str:
        marks.append(f"{mark}{name}z")
        return marks[-1]

    reasoning = marked.get("reasoning_content")
    content = marked.get("content") or ""
    calls = marked.get("tool_calls") or ()
    if reasoning and reasoning.strip():
        marked["reasoning_content"] = reasoning + put("reasoning")
    elif END_OF_REASONING in content:
        thought, _, rest = content.partition(END_OF_REASONING)
        if thought.replace("<think>", "").strip():
            thought += put("thought")
        content = thought + END_OF_REASONING + rest
    if content.strip() or not calls:
        marked["content"] = content + put("content")
    if calls:
        marked["tool_calls"] = [_mark_call(call, put(f"call{i}")) for i, call in enumerate(calls)]
    return marked, marks


def mark_content(message: Message, mark: str) -> tuple[dict[str, Any], list[str]]:
    """Return the answer with a mark in its content alone, and the mark."""
    return {**message, "content": (message.get("content") or "") + mark}, [mark]


def drop_reasoning(message: Message, text_is_reasoning: bool = False) -> Message:
    """Return the message without the assistant's reasoning.

    `text_is_reasoning`: text beside a call is reasoning, too.
    """
    if message.get("role") != "assistant":
        return message
    if text_is_reasoning and message.get("tool_calls"):
        message = {**message, "content": ""}
    stripped = {key: value for key, value in message.items() if key != "reasoning_content"}
    content = stripped.get("content")
    if isinstance(content, str) and END_OF_REASONING in content:
        stripped["content"] = content.rpartition(END_OF_REASONING)[2]
    return stripped


def _mark_call(call: Any, mark: str) -> dict[str, Any]:
    function = {**call["function"], "arguments": json.dumps({"mark": mark})}
    return {**call, "function": function}


class TurnEnd:
    """The stop tokens of an engine, as texts in a rendered conversation."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int]) -> None:
        self._stops = {
            token_id: str(tokenizer.decode([token_id], skip_special_tokens=False))
            for token_id in stop_token_ids
        }
        added = tokenizer.added_tokens_decoder.values()
        self._tokens = sorted(
            {*(str(token.content) for token in added), *self._stops.values()},
            key=len,
            reverse=True,
        )
        self._special = {str(token.content) for token in added if token.special}

    def find_sampled_stop(self, answer_ids: Sequence[int]) -> str | None:
        """Return the text of the stop token that ends the answer; None if it was cut off."""
        return self._stops.get(answer_ids[-1]) if answer_ids else None

    def find_tail(self, alone: str, now: str, answer_ids: Sequence[int]) -> str | None:
        """Return the text that follows the sampled answer; None if its place isn't known.

        alone   text after the answer's last part if nothing follows the answer
        now     the same if messages and the generation prompt follow

        Either a token closes the answer's turn. The sampled stop token stands for it even if it is
        another one: gpt-oss samples <|return|> and later reads <|end|>. Or the next message opens
        with a stop token, as GLM's <|user|> and <|observation|> do. It follows an answer that was
        cut off or that ended with another stop token.
        """
        stop = self.find_sampled_stop(answer_ids)
        closing = self._make_closing(alone)
        start = len(alone) if closing is None else closing
        if not now.startswith(alone[:start]):
            return None
        rest = now[start:]
        if closing is None:
            return rest.removeprefix(stop) if stop else rest
        token = next((token for token in self._tokens if token and rest.startswith(token)), None)
        if token is None:
            return None
        return rest.removeprefix(token) if stop else rest

    def _make_closing(self, text: str) -> int | None:
        """Return where the token that closes the answer's turn begins; None if there is none.

        It is the first stop token, or else a special token that is all that follows the answer:
        templates may close turns with a token that the model's settings do not name.
        """
        starts = [text.find(stop) for stop in self._stops.values() if stop and stop in text]
        if starts:
            return min(starts)
        return text.find(text.strip()) if text.strip() in self._special else None


Reasoning = Literal["template", "keep"]


class ChatFormat:
    """Token ids of conversations by a tokenizer's chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Sequence[int],
        *,
        reasoning: Reasoning,
        template_options: Mapping[str, Any],
    ) -> None:
        """`stop_token_ids`: the tokens with which the engine ends a response.

        reasoning          template: an answer's reasoning stays in the context as long as the
                           template shows it; keep: it stays
        template_options   variables of the template, such as enable_thinking

        Raises ValueError if there is no template, or if it cannot render one user message.
        """
        if reasoning not in ("template", "keep"):
            raise ValueError(f"agents.reasoning={reasoning}: must be template or keep")
        self.reasoning: Reasoning = reasoning
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, template_options)
        self._turn_end = TurnEnd(tokenizer, stop_token_ids)
        self._shortcut = Shortcut(self._follow)
        self.hidden_tools: set[str] = set()
        """Names of tools that conversations had and the template did not show."""
        hello = [{"role": "user", "content": "hello"}]
        without = self._template.render(hello, (), generation_prompt=False)
        text = self._template.render(hello, (), generation_prompt=True)
        self.generation_prompt = text.removeprefix(without) if text.startswith(without) else ""
        """Text after the last message, with which the assistant's turn begins."""

    def render_whole(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[int, ...]:
        """Return the ids of the conversation and the generation prompt.

        Raises ValueError if the template refuses the conversation.
        """
        if tools and not self._template.shows_tools:
            self.hidden_tools.update(tool["function"]["name"] for tool in tools)
        text = self._template.render(messages, tools, generation_prompt=True)
        return tuple(self._encode(text))

    def render_appended(
        self,
        history: Sequence[Message],
        answer_ids: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[Tool],
    ) -> tuple[int, ...] | None:
        """Return the ids that follow `answer_ids`, the answer that the last message tells.

        They are the rest of the end of the answer's turn, the messages `new` and the generation
        prompt. The row up to `answer_ids` must have been made from history[:-1] by `render_whole`
        and `render_appended`, with the same tools. How an answer was written (white space in JSON,
        say) does not matter: its text is never compared with the template's.

        None: the template changes what the row shows, or refuses one of the conversations, or
        it isn't known where the answer's turn ends. `render_whole` then begins another row. With
        reasoning=keep, dropped reasoning is no such change.
        Raises ValueError if the last message of `history` is not the assistant's.
        """
        if not history or history[-1].get("role") != "assistant":
            roles = [message.get("role") for message in history]
            raise ValueError(f"no answer of the assistant ends the history; its roles are {roles}")
        tail = self._shortcut.follow(history, answer_ids, new, tools)
        return None if tail is None else self._encode_after(answer_ids, tail)

    def allow_excerpts(self) -> bool:
        """Have `render_appended` render excerpts of long conversations, if trials show no change.

        Returns whether it does. The time of `render_appended` then hardly grows with the
        conversation.
        """
        return self._shortcut.open(self._template.source, TRIAL_TOOL)

    @property
    def num_wrong_excerpts(self) -> int:
        """Answers after which an excerpt was rendered otherwise than the whole conversation.

        A share of them is checked; the first difference is logged and ends the use of excerpts.
        """
        return self._shortcut.num_wrong

    def probe(self) -> TemplateBehavior:
        """Return what happens to a row in the situations that episodes meet."""
        kept = copy.copy(self)
        kept.reasoning = "keep"
        kept._shortcut = Shortcut(kept._follow)
        return probe_format(self, kept, self._template.shows_calls)

    def _follow(
        self,
        history: Sequence[Message],
        answer_ids: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[Tool],
    ) -> str | None:
        """Return the text after the answer; None if another row begins. See `render_appended`."""
        keep = self.reasoning == "keep"
        if keep:
            text_too = self._template.text_is_reasoning
            history = [drop_reasoning(message, text_too) for message in history]
            new = [drop_reasoning(message, text_too) for message in new]
        answer, marks = mark_answer(history[-1], find_unused_mark([*history, *new]))
        tail = self._tail([*history[:-1], answer], answer_ids, new, tools, marks, any_mark=keep)
        if tail is None and keep and answer.get("tool_calls"):
            # The template may leave calls out. The row still shows them.
            answer, marks = mark_content(history[-1], marks[0])
            tail = self._tail([*history[:-1], answer], answer_ids, new, tools, marks, any_mark=True)
        return tail

    def _tail(
        self,
        history: Sequence[Message],
        answer_ids: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[Tool],
        marks: Sequence[str],
        any_mark: bool,
    ) -> str | None:
        """Return the text after the answer; None if there is no such text that only appends.

        The last message of `history` is the answer with its `marks`. `any_mark`: the template may
        leave out parts of the answer.
        """
        earlier = history[:-1]
        try:
            before = self._template.render(earlier, tools, True) if earlier else ""
            alone = self._template.render(history, tools, False)
            now = self._template.render([*history, *new], tools, True)
        except RenderError:
            return None
        # The generation prompt opened the answer's turn; what it says beyond that stays in the row.
        if not now.startswith(before.removesuffix(self.generation_prompt)):
            return None
        shown = [mark for mark in marks if mark in now]
        if not shown or (len(shown) < len(marks) and not any_mark):
            return None
        return self._turn_end.find_tail(_after(alone, shown), _after(now, shown), answer_ids)

    def _encode_after(self, answer_ids: Sequence[int], tail: str) -> tuple[int, ...]:
        """Tokenize `tail` as it would be after the answer's stop token, if that is what precedes.

        Some tokenizers treat the beginning of a text differently: SentencePiece puts a space there.
        """
        ending = self._turn_end.find_sampled_stop(answer_ids)
        if ending is not None:
            ids = self._encode(ending + tail)
            if ids[:1] == [answer_ids[-1]]:
                return tuple(ids[1:])
        return tuple(self._encode(tail))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _after(text: str, marks: Sequence[str]) -> str:
    """Return what follows the last of the marks in `text`; all of `text` if it has none."""
    return text[max(text.find(mark) + len(mark) if mark in text else 0 for mark in marks) :]

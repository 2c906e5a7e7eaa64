"""What a served model is asked of each sample, and its answers as numbers; others send them."""

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from mcore_rl.config import JudgeConfig
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.rewards.user_function import find_file
from mcore_rl.types import Sample

Post = Callable[[str, Sequence[Mapping[str, Any]]], Awaitable[list[Any]]]
"""(path, bodies) -> the server's answer to each, or the exception that it came to."""
SHOWN_CHARS = 500


class ModelScorer(Protocol):
    path: str
    """Of the server, after its address."""

    def request(self, sample: Sample) -> dict[str, Any]:
        """The body to post. Raises ValueError."""
        ...

    def read(self, answer: Any) -> float:
        """The number in the server's answer. Raises ValueError that shows the answer."""
        ...


class JudgeScorer:
    """A chat of one message with a model that gives a verdict in words or as a number."""

    path = "/v1/chat/completions"

    def __init__(self, config: JudgeConfig) -> None:
        """ValueError: no such template, or it is none."""
        self._config = config
        environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=False)
        file = find_file("reward.judge.template", config.template)
        try:
            self._template = environment.from_string(file.read_text())
        except TemplateError as error:
            raise ValueError(f"reward.judge.template={config.template}: {error}") from None

    def request(self, sample: Sample) -> dict[str, Any]:
        prompt = sample.prompt
        try:
            text = self._template.render(
                prompt=next(
                    (m["content"] for m in reversed(prompt.messages) if m["role"] == "user"), ""
                ),
                response=sample.text,
                ground_truth=prompt.ground_truth,
                messages=prompt.messages,
                data_source=prompt.data_source,
                extra_info=prompt.extra_info,
            )
        except TemplateError as error:
            raise ValueError(f"reward.judge.template={self._config.template}: {error}") from None
        return {
            "messages": [{"role": "user", "content": text}],
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_tokens,
            **self._config.request,
        }

    def read(self, answer: Any) -> float:
        try:
            text = answer["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"the judge's answer is no chat: {_shown(answer)}") from None
        verdicts = re.findall(self._config.verdict, text)
        if not verdicts:
            raise ValueError(f"no verdict in the judge's answer {text[-SHOWN_CHARS:]!r}")
        value = self._value(verdicts[-1])
        if value is None or not self._config.low <= value <= self._config.high:
            raise ValueError(f"the judge's verdict is {verdicts[-1]!r}, in {text[-SHOWN_CHARS:]!r}")
        return value

    def _value(self, verdict: str) -> float | None:
        words = {word.casefold(): value for word, value in self._config.words.items()}
        if words:
            return words.get(verdict.casefold())
        try:
            return float(verdict)
        except ValueError:
            return None


class RewardModelScorer:
    """The chat's tokens, as the reward model's own tokenizer and chat template have them."""

    path = "/classify"

    def __init__(self, folder: str, trust_remote_code: bool = False) -> None:
        """Read the tokenizer in `folder`, the reward model's own or its tokenizer's.

        `trust_remote_code`: run a tokenizer that is Python code in the folder. Raises ValueError if
        there is no tokenizer with a chat template, or if the model is no reward model.
        """
        hf_config = _read_json(Path(folder) / "config.json")
        labels = hf_config.get("id2label")
        if labels is not None and len(labels) != 1:
            raise ValueError(
                f"the reward model in {folder} has {len(labels)} outputs {sorted(labels.values())}; a reward"
                " is one number"
            )
        self._tokenizer: Any = load_tokenizer(folder, "reward_model.path", trust_remote_code)
        if not self._tokenizer.chat_template:
            raise ValueError(f"the reward model's tokenizer in {folder} has no chat template")
        self._pad_id = hf_config.get("pad_token_id")

    def request(self, sample: Sample) -> dict[str, Any]:
        return {"input_ids": self.tokens(sample)}

    def tokens(self, sample: Sample) -> list[int]:
        """Up to the last that is not padding, which is where transformers reads the score."""
        chat = [*map(dict, sample.prompt.messages), {"role": "assistant", "content": sample.text}]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        while self._pad_id is not None and len(ids) > 1 and ids[-1] == self._pad_id:
            ids.pop()
        return ids

    def read(self, answer: Any) -> float:
        try:
            [value] = answer["embedding"]
            return float(value)
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                f"the reward model's answer is not one number: {_shown(answer)}"
            ) from None


async def ask(
    question: ModelScorer, post: Post, samples: Sequence[Sample]
) -> list[float | Exception]:
    """The number for each sample, or why there is none."""
    bodies = [_tried(question.request, sample) for sample in samples]
    sent = [i for i, body in enumerate(bodies) if not isinstance(body, Exception)]
    answers: list[Any] = list(bodies)
    for i, answer in zip(sent, await post(question.path, [bodies[i] for i in sent]), strict=True):
        answers[i] = answer if isinstance(answer, Exception) else _tried(question.read, answer)
    return answers


def _tried(call: Callable[[Any], Any], value: Any) -> Any:
    try:
        return call(value)
    except ValueError as error:
        return error


def _shown(answer: Any) -> str:
    return json.dumps(answer, default=str)[:SHOWN_CHARS]


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}

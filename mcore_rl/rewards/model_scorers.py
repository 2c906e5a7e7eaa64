"""Turns samples into requests to a served model, and reads the numbers in its answers.

A judge answers in words or numbers, a reward model with one number. Sending is left to the caller.
"""

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from mcore_rl.config import JudgeConfig
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.process.errors import make_encodable
from mcore_rl.rewards.user_function import find_file
from mcore_rl.types import Prompt, Sample

Post = Callable[[str, Sequence[Mapping[str, Any]]], Awaitable[list[Any]]]
"""(path, bodies) -> for each body, the server's answer or the exception that it led to."""
SHOWN_CHARS = 500
"""Characters of an answer that an error message shows."""


class ModelScorer(Protocol):
    path: str
    """Path of the URL to post to, after the server's address."""

    def request(self, sample: Sample) -> dict[str, Any]:
        """Return the body to post. Raises ValueError if there can be none for this sample."""
        ...

    def read(self, answer: Any) -> float:
        """Return the number in the server's answer. Raises ValueError that shows the answer."""
        ...


class JudgeScorer:
    """Asks a model in a chat of one message; its verdict is a word or a number."""

    path = "/v1/chat/completions"

    def __init__(self, config: JudgeConfig) -> None:
        """Raises ValueError if the template does not exist or is not valid."""
        self._config = config
        environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=False)
        file = find_file("reward.judge.template", config.template)
        try:
            self._template = environment.from_string(file.read_text())
        except TemplateError as error:
            raise ValueError(f"reward.judge.template={config.template}: {error}") from None

    def request(self, sample: Sample) -> dict[str, Any]:
        return {
            "messages": [{"role": "user", "content": self._render(sample)}],
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_tokens,
            **self._config.request,
        }

    def _render(self, sample: Sample) -> str:
        prompt = sample.prompt
        try:
            text = self._template.render(
                prompt=_last_user_message(prompt),
                response=sample.text,
                ground_truth=prompt.ground_truth,
                messages=prompt.messages,
                data_source=prompt.data_source,
                extra_info=prompt.extra_info,
            )
        except Exception as error:  # an expression in the user's template may raise anything
            raise ValueError(f"reward.judge.template={self._config.template}: {error}") from None
        return make_encodable(text)

    def read(self, answer: Any) -> float:
        try:
            text = answer["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"the judge's answer is no chat: {_shorten(answer)}") from None
        if not isinstance(text, str):
            raise ValueError(f"the judge's answer is no text: {_shorten(answer)}")
        verdicts = re.findall(self._config.verdict, text)
        if not verdicts:
            raise ValueError(f"no verdict in the judge's answer {text[-SHOWN_CHARS:]!r}")
        value = self._value_of(verdicts[-1])
        if value is None or not self._config.low <= value <= self._config.high:
            raise ValueError(f"the judge's verdict is {verdicts[-1]!r}, in {text[-SHOWN_CHARS:]!r}")
        return value

    def _value_of(self, verdict: str) -> float | None:
        words = {word.casefold(): value for word, value in self._config.words.items()}
        if words:
            return words.get(verdict.casefold())
        try:
            return float(verdict)
        except ValueError:
            return None


class RewardModelScorer:
    """Sends the chat as tokens of the reward model's own tokenizer and chat template."""

    path = "/classify"

    def __init__(self, folder: str, trust_remote_code: bool = False) -> None:
        """Open the tokenizer in `folder`, which may also hold the reward model.

        `trust_remote_code`: run a tokenizer that is Python code in the folder. Raises ValueError if
        there is no tokenizer with a chat template, or if the model there has more than one output.
        """
        hf_config = _read_json(Path(folder) / "config.json")
        labels = hf_config.get("id2label")
        if labels is not None and len(labels) != 1:
            raise ValueError(
                f"the reward model in {folder} has {len(labels)} outputs"
                f" {sorted(labels.values())}; a reward is one number"
            )
        self._tokenizer: Any = load_tokenizer(folder, "reward_model.path", trust_remote_code)
        if not self._tokenizer.chat_template:
            raise ValueError(f"the reward model's tokenizer in {folder} has no chat template")
        self._pad_id = hf_config.get("pad_token_id")

    def request(self, sample: Sample) -> dict[str, Any]:
        return {"input_ids": self.tokens(sample)}

    def tokens(self, sample: Sample) -> list[int]:
        """Return the chat's tokens without padding at the end.

        transformers reads the score at the last token that is not padding.
        """
        answer = {"role": "assistant", "content": sample.text}
        chat = [*map(dict, sample.prompt.messages), answer]
        text = make_encodable(self._tokenizer.apply_chat_template(chat, tokenize=False))
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
                f"the reward model's answer is not one number: {_shorten(answer)}"
            ) from None


async def ask(
    scorer: ModelScorer, post: Post, samples: Sequence[Sample]
) -> list[float | Exception]:
    """Return, for each sample, the number that the model gives or the error that prevents it."""
    results: list[Any] = [_value_or_error(scorer.request, sample) for sample in samples]
    indices = [i for i, body in enumerate(results) if not isinstance(body, Exception)]
    answers = await post(scorer.path, [results[i] for i in indices])
    for i, answer in zip(indices, answers, strict=True):
        is_error = isinstance(answer, Exception)
        results[i] = answer if is_error else _value_or_error(scorer.read, answer)
    return results


def _value_or_error(call: Callable[[Any], Any], value: Any) -> Any:
    try:
        return call(value)
    except ValueError as error:
        return error


def _last_user_message(prompt: Prompt) -> str:
    texts = [message["content"] for message in prompt.messages if message["role"] == "user"]
    return texts[-1] if texts else ""


def _shorten(answer: Any) -> str:
    return json.dumps(answer, default=str)[:SHOWN_CHARS]


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}

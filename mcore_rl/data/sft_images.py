"""Conversations with images and videos: their token ids, and the patches of a batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_rl.data.images.batch import join_patches
from mcore_rl.data.images.prompts import ImagePrompts
from mcore_rl.data.rows import load_rows, messages_of
from mcore_rl.types import Patches, PromptImage, TrainBatch

MESSAGES = "messages"
Encode = Callable[[list[dict[str, Any]], bool], list[int]]
"""(chat messages, whether a generation prompt follows) -> token ids by the model's template."""
AnsweredImages = tuple[tuple[int, ...], int, tuple[PromptImage, ...]]
"""(token ids of the conversation, number of them before the last answer, its images)."""


class SftImages:
    """Reads conversations whose images stand before the last answer."""

    def __init__(
        self, prompts: ImagePrompts, encode: Encode, make: Callable[[PromptImage], Patches]
    ) -> None:
        """`prompts` reads the column `messages`; `make` gives an image's patches."""
        self._prompts = prompts
        self._encode = encode
        self._make = make

    def read(self, files: Sequence[str]) -> list[AnsweredImages]:
        """Return the conversations of all rows that the rules for images do not leave out.

        Raises ValueError naming the row if it does not end with the assistant's answer, or if the
        chat template does not write the answer right after the generation prompt.
        """
        made = []
        for name in files:
            for where, row in load_rows([name]):
                messages = messages_of(row, where, MESSAGES)
                if not messages or messages[-1].get("role") != "assistant":
                    raise ValueError(
                        f"{where}: `messages` must end with a message of role 'assistant'"
                    )
                asked = {**row, MESSAGES: list(messages[:-1])}
                prompt = self._prompts.prompt(where, asked, Path(name).parent)
                if prompt is not None:
                    answer = self._answer(prompt.messages, messages[-1], where)
                    made.append((prompt.token_ids + answer, len(prompt.token_ids), prompt.images))
        return made

    def _answer(
        self, asked: Sequence[Mapping[str, Any]], answer: Mapping[str, Any], where: str
    ) -> tuple[int, ...]:
        question = [dict(message) for message in asked]
        before = self._encode(question, True)
        whole = self._encode([*question, dict(answer)], False)
        if whole[: len(before)] != before or len(whole) == len(before):
            raise ValueError(
                f"{where}: the chat template does not continue its generation prompt with the"
                f" answer, as in {answer}: the loss mask cannot be placed"
            )
        return tuple(whole[len(before) :])

    def add(self, batch: TrainBatch, images: Sequence[Sequence[PromptImage]]) -> TrainBatch:
        """Return the batch with the patches of its sequences' images."""
        patches = [[self._make(image) for image in of_sequence] for of_sequence in images]
        return replace(batch, images=join_patches(patches))

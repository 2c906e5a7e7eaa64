"""Turns conversations into train batches with the loss on the last answer.

Conversations with images and videos become token ids, and their batches get the patches.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mcore_rl.batches.batch import with_loss_weights
from mcore_rl.data.images.batch import join_patches
from mcore_rl.data.images.prompts import ImagePrompts
from mcore_rl.data.rows import load_rows, messages_of, refuse_images, require
from mcore_rl.data.source import ShuffledStream
from mcore_rl.data.tokenization import Tokenization, Tokenizer
from mcore_rl.types import Patches, PromptImage, TrainBatch

MESSAGES = "messages"
Encode = Callable[[list[dict[str, Any]], bool], list[int]]
"""(chat messages, whether a generation prompt follows) -> token ids by the model's template."""
AnsweredImages = tuple[tuple[int, ...], int, tuple[PromptImage, ...]]
"""(token ids of the conversation, number of them before the last answer, its images)."""
logger = logging.getLogger(__name__)
Conversation = Sequence[dict[str, str]]
Answered = tuple[tuple[int, ...], int]
"""(token ids of the conversation, number of them before the last answer)."""


class SftImages:
    """Reads conversations whose images stand before the last answer."""

    def __init__(
        self, prompts: ImagePrompts, encode: Encode, make: Callable[[PromptImage], Patches]
    ) -> None:
        """`prompts` reads the column `messages`; `make` gives an image's patches."""
        self._prompts = prompts
        self._encode = encode
        self._make = make

    @property
    def left_out(self) -> Mapping[str, int]:
        """Rows left out so far: "overlong" questions with their images, and "bad" images."""
        return self._prompts.left_out

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


class SftStream:
    """Endless shuffled batches; position saved and restored like a ShuffledStream's."""

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: Tokenizer,
        max_len: int,
        seed: int,
        cache_dir: Path | None = None,
        images: SftImages | None = None,
    ) -> None:
        """Drop and count conversations of more than `max_len` tokens, or with images to skip.

        Raises ValueError if none is left. `cache_dir` keeps token ids; None keeps nothing.
        `images` reads the conversations for a model that sees images; None: rows with images raise
        ValueError.
        """
        self._images = images
        if images is not None:
            answered = images.read(files)
        else:
            conversations = load_conversations(files)
            tokenization = Tokenization(tokenizer, cache_dir)
            pairs = tokenize_answered(conversations, tokenization, files, "messages")
            answered = [(ids, start, ()) for ids, start in pairs]
        kept = [each for each in answered if len(each[0]) <= max_len]
        left_out = images.left_out if images is not None else {}
        num_long = len(answered) - len(kept) + left_out.get("overlong", 0)
        num_bad = left_out.get("bad", 0)
        logger.info(
            "%d conversations, %d of more than %d tokens and %d with bad images dropped",
            *(len(kept), num_long, max_len, num_bad),
        )
        if not kept:
            raise ValueError(
                f"{', '.join(files)}: no conversation of at most sft.max_len={max_len} tokens is"
                f" left: {num_long} have more, {num_bad} have images that cannot be used"
            )
        self._stream: ShuffledStream[AnsweredImages] = ShuffledStream(kept, seed)

    def next_batch(self, num_sequences: int) -> TrainBatch:
        taken = self._stream.take(num_sequences)
        batch = make_sft_batch([(ids, start) for ids, start, _ in taken])
        if self._images is None:
            return batch
        return self._images.add(batch, [images for _, _, images in taken])

    def state_dict(self) -> dict[str, Any]:
        return self._stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stream.load_state_dict(state)


def load_conversations(files: Sequence[str]) -> list[list[dict[str, str]]]:
    """Return the `messages` column of every row.

    Raises ValueError naming the row if a conversation does not end with the assistant's answer, or
    has images.
    """
    conversations = []
    for where, row in load_rows(files):
        refuse_images(row, where)
        messages = [dict(message) for message in require(row, "messages", where)]
        if not messages or messages[-1].get("role") != "assistant":
            raise ValueError(f"{where}: `messages` must end with a message of role 'assistant'")
        conversations.append(messages)
    return conversations


def tokenize_answered(
    conversations: Sequence[Conversation],
    tokenization: Tokenization,
    files: Sequence[str],
    column: str,
) -> list[Answered]:
    """Tokenize conversations that end with an answer; see Tokenization.encode for the arguments.

    Raises ValueError if the chat template does not write the answer right after the generation
    prompt.
    """
    questions = [messages[:-1] for messages in conversations]
    befores = tokenization.encode(questions, add_generation_prompt=True, files=files, column=column)
    wholes = tokenization.encode(
        conversations, add_generation_prompt=False, files=files, column=column
    )
    for messages, before, whole in zip(conversations, befores, wholes, strict=True):
        if whole[: len(before)] != before or len(whole) == len(before):
            raise ValueError(
                "the chat template does not continue its generation prompt with the answer, as in"
                f" {messages[-1]}: the loss mask cannot be placed"
            )
    return [(whole, len(before)) for before, whole in zip(befores, wholes, strict=True)]


def make_sft_batch(answered: Sequence[Answered]) -> TrainBatch:
    """Return a batch whose loss is the mean over all answer tokens."""
    return with_loss_weights(
        answers_batch(answered), "token_mean", max_response_len=max(len(ids) for ids, _ in answered)
    )


def answers_batch(answered: Sequence[Answered]) -> TrainBatch:
    """Return the sequences end to end, with the answers on the loss mask and no loss weights."""
    mask = [i >= start for ids, start in answered for i in range(len(ids))]
    return TrainBatch(
        token_ids_T=torch.tensor([token for ids, _ in answered for token in ids]),
        loss_mask_T=torch.tensor(mask),
        lens_N=tuple(len(ids) for ids, _ in answered),
    )

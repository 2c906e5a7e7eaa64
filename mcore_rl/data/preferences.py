"""Turns preference files into batches in which chosen and rejected sequences alternate."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.batches.batch import with_loss_weights
from mcore_rl.data.rows import load_rows, refuse_images, require
from mcore_rl.data.sft import Answered, answers_batch, tokenize_answered
from mcore_rl.data.source import ShuffledStream
from mcore_rl.data.tokenization import Tokenization, Tokenizer
from mcore_rl.types import TrainBatch

logger = logging.getLogger(__name__)
Messages = list[dict[str, str]]
Pair = tuple[Answered, Answered]


class PreferenceStream:
    """Endless shuffled batches of pairs; position saved and restored like a ShuffledStream's."""

    def __init__(self, pairs: Sequence[Pair], seed: int) -> None:
        self._stream = ShuffledStream(pairs, seed)

    def next_batch(self, num_sequences: int) -> TrainBatch:
        return make_pair_batch(self._stream.take(num_sequences // 2))

    def state_dict(self) -> dict[str, Any]:
        return self._stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stream.load_state_dict(state)


def load_pairs(
    files: Sequence[str], tokenizer: Tokenizer, max_len: int, cache_dir: Path | None = None
) -> list[Pair]:
    """Return all rows of `files` as (chosen, rejected), tokenized with the chat template.

    Pairs with a sequence of more than `max_len` tokens and pairs of equal sequences are dropped and
    counted. Raises ValueError naming a row that is no pair, or the files if no pair is left.
    `cache_dir` keeps token ids; None keeps nothing.
    """
    rows = [conversations(row, where) for where, row in load_rows(files)]
    tokenization = Tokenization(tokenizer, cache_dir)
    chosen, rejected = (
        tokenize_answered([row[side] for row in rows], tokenization, files, column)
        for side, column in enumerate(("chosen", "rejected"))
    )
    pairs = list(zip(chosen, rejected, strict=True))
    short = [(a, b) for a, b in pairs if max(len(a[0]), len(b[0])) <= max_len]
    kept = [(a, b) for a, b in short if a != b]
    logger.info(
        "%d preference pairs from %s, %d with more than %d tokens and %d of two equal responses"
        " dropped",
        len(kept),
        ", ".join(files),
        len(pairs) - len(short),
        max_len,
        len(short) - len(kept),
    )
    if not kept:
        raise ValueError(
            f"{', '.join(files)}: none of {len(pairs)} rows is a pair of different conversations of"
            f" at most dpo.max_len={max_len} tokens"
        )
    return kept


def conversations(row: Mapping[str, Any], where: str) -> tuple[Messages, Messages]:
    """Return the conversation with the chosen answer and the one with the rejected answer.

    `chosen` and `rejected` are texts or lists of messages: the answer alone after `prompt` (a text
    or messages), or the whole conversation.
    """
    refuse_images(row, where)
    chosen, rejected = (_conversation(row, name, where) for name in ("chosen", "rejected"))
    if chosen[:-1] != rejected[:-1]:
        raise ValueError(
            f"{where}: `chosen` and `rejected` answer different prompts: {chosen[:-1]!r:.200} and"
            f" {rejected[:-1]!r:.200}"
        )
    return chosen, rejected


def _conversation(row: Mapping[str, Any], name: str, where: str) -> Messages:
    messages = _messages(require(row, name, where), "assistant")
    if len(messages) == 1:
        messages = _messages(require(row, "prompt", where), "user") + messages
    if len(messages) < 2 or messages[-1].get("role") != "assistant":
        raise ValueError(
            f"{where}: `{name}` must end with the assistant's answer to a prompt, is"
            f" {messages!r:.300}"
        )
    return messages


def _messages(value: Any, role: str) -> Messages:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return [dict(message) for message in value]


def make_pair_batch(pairs: Sequence[Pair]) -> TrainBatch:
    """Lay out pair i as sequences 2 i (chosen) and 2 i + 1 (rejected), with the loss on answers."""
    sequences = [sequence for pair in pairs for sequence in pair]
    batch = answers_batch(sequences)
    return with_loss_weights(batch, "token_sum", max_response_len=max(batch.lens_N))


def batches_of(pairs: Sequence[Pair], num_pairs: int) -> list[TrainBatch]:
    """Cut all of `pairs`, in their order, into batches of `num_pairs`; the last may be smaller."""
    return [make_pair_batch(pairs[i : i + num_pairs]) for i in range(0, len(pairs), num_pairs)]


def preference_row(
    prompt: Sequence[Mapping[str, str]], chosen: str, rejected: str
) -> dict[str, Any]:
    """Return a row of a preference file."""
    return {
        "prompt": [dict(message) for message in prompt],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }

"""Conversations in, train batches with the loss on the last answer out."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from mcore_rl.data.batch import with_loss_weights
from mcore_rl.data.prompts import Tokenizer, load_conversations
from mcore_rl.data.source import ShuffledStream
from mcore_rl.types import TrainBatch

logger = logging.getLogger(__name__)
Answered = tuple[tuple[int, ...], int]
"""(token ids of the conversation, how many of them stand before the answer)."""


class SftStream:
    """Endless shuffled batches; position saved and restored like a ShuffledStream's."""

    def __init__(self, files: Sequence[str], tokenizer: Tokenizer, max_len: int, seed: int) -> None:
        """ValueError if no conversation has at most `max_len` tokens; longer ones are dropped and counted."""
        answered = [tokenize(messages, tokenizer) for messages in load_conversations(files)]
        kept = [a for a in answered if len(a[0]) <= max_len]
        logger.info(
            "%d conversations, %d of more than %d tokens dropped",
            len(kept),
            len(answered) - len(kept),
            max_len,
        )
        if not kept:
            raise ValueError(
                f"{', '.join(files)}: no conversation of at most sft.max_len={max_len} tokens"
            )
        self._stream = ShuffledStream(kept, seed)

    def next_batch(self, num_sequences: int) -> TrainBatch:
        return make_sft_batch(self._stream.take(num_sequences))

    def state_dict(self) -> dict[str, Any]:
        return self._stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stream.load_state_dict(state)


def tokenize(messages: Sequence[dict[str, str]], tokenizer: Tokenizer) -> Answered:
    """ValueError if the chat template does not write the answer behind the generation prompt."""
    options = {"tokenize": True, "return_dict": False}
    before = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, **options)
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=False, **options)
    if whole[: len(before)] != before or len(whole) == len(before):
        raise ValueError(
            f"the chat template does not continue its generation prompt with the answer, as in"
            f" {messages[-1]}:"
            " the loss mask cannot be placed"
        )
    return tuple(whole), len(before)


def make_sft_batch(answered: Sequence[Answered]) -> TrainBatch:
    """Mean over all answer tokens of the batch."""
    batch = TrainBatch(
        token_ids_T=torch.tensor([t for ids, _ in answered for t in ids]),
        loss_mask_T=torch.tensor([i >= start for ids, start in answered for i in range(len(ids))]),
        lens_N=tuple(len(ids) for ids, _ in answered),
    )
    return with_loss_weights(batch, "token_mean", max_response_len=max(batch.lens_N))

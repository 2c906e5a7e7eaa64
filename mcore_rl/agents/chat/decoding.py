"""Text of token ids, with the place of each token in it."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

BROKEN = "\ufffd"
"""Decoding puts it where bytes are no whole character."""


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Return the text of the tokens, special tokens included, blanks as they are."""
    return str(
        tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )


def token_starts(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], text: str
) -> list[int]:
    """Return the offset in `text` at which each token begins; `text` is what the tokens decode to.

    Tokens that share a character begin where it begins.
    """
    starts, pieces = _starts_by_piece(tokenizer, token_ids)
    if "".join(pieces) == text:
        return starts
    return _starts_in_context(tokenizer, token_ids)


def token_span(starts: Sequence[int], start: int, stop: int) -> tuple[int, int]:
    """Return the range of tokens that hold the characters [start, stop)."""
    first = bisect_right(starts, start) - 1
    return bisect_left(starts, starts[first]), bisect_left(starts, stop)


def _starts_by_piece(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]
) -> tuple[list[int], list[str]]:
    """Decode token by token, tokens with parts of a character together."""
    known: dict[int, str] = {}
    starts: list[int] = []
    pieces: list[str] = []
    broken: list[int] = []
    length = 0
    for token_id in token_ids:
        if token_id not in known:
            known[token_id] = decode(tokenizer, [token_id])
        piece = known[token_id]
        if broken and BROKEN not in piece:
            pieces.append(decode(tokenizer, broken))
            length += len(pieces[-1])
            broken = []
        starts.append(length)
        if BROKEN in piece:
            broken.append(token_id)
        else:
            pieces.append(piece)
            length += len(piece)
    if broken:
        pieces.append(decode(tokenizer, broken))
    return starts, pieces


def _starts_in_context(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[int]:
    """Decode each token after the one before it: SentencePiece drops the blank of the first."""
    starts: list[int] = []
    length = 0
    window = 0
    read = 0
    for index in range(len(token_ids)):
        starts.append(length)
        piece = decode(tokenizer, token_ids[window : index + 1])
        if not piece.endswith(BROKEN):
            length += len(piece) - len(decode(tokenizer, token_ids[window:read]))
            window = read
            read = index + 1
    return starts

"""The place of each token in the text that tokens decode to."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from mcore_rl.agents.chat.answer_parser import decode, find_token_span, find_token_starts
from tests.support.chat_templates import make_tokenizer


@pytest.fixture(scope="module")
def blanks() -> Any:
    """A tokenizer that writes blanks as SentencePiece does, and drops the first of a text."""
    pieces = ["<unk>", "\u2581", *"abc", "\u2581a", "\u2581ab", "bc"]
    model = models.BPE(
        {piece: i for i, piece in enumerate(pieces)},
        [("\u2581", "a"), ("\u2581a", "b"), ("b", "c")],
        unk_token="<unk>",
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def check_spans(tokenizer: Any, ids: list[int]) -> None:
    """The tokens of every span of characters hold these characters, and no token too many."""
    text = decode(tokenizer, ids)
    starts = find_token_starts(tokenizer, ids, text)
    assert len(starts) == len(ids)
    assert starts == sorted(starts)
    for index, start in enumerate(starts):
        stop = starts[index + 1] if index + 1 < len(starts) else len(text)
        if stop == start:
            continue
        first, last = find_token_span(starts, start, stop)
        assert starts[first] == start
        assert decode(tokenizer, ids[:last]) == text[:stop]
        assert first <= index < last


@given(text=st.text("ab <>\n{}é漢🙂", max_size=30))
def test_tokens_of_bytes(text: str) -> None:
    tokenizer = make_tokenizer("qwen3")
    ids = tokenizer.encode(f"{text}<tool_call>{text}</tool_call>", add_special_tokens=False)
    check_spans(tokenizer, ids)
    starts = find_token_starts(tokenizer, ids, decode(tokenizer, ids))
    first, last = find_token_span(starts, len(text), 2 * len(text) + 23)
    assert decode(tokenizer, ids[first:last]) == f"<tool_call>{text}</tool_call>"


@given(ids=st.lists(st.integers(0, 299), max_size=20))
def test_any_tokens_have_a_place(ids: list[int]) -> None:
    """Sampled bytes need not be whole characters."""
    tokenizer = make_tokenizer("qwen3")
    text = decode(tokenizer, ids)
    starts = find_token_starts(tokenizer, ids, text)
    assert len(starts) == len(ids)
    assert starts == sorted(starts)
    assert all(start <= len(text) for start in starts)


@given(text=st.text("abc ", max_size=20))
def test_tokens_of_blanks(blanks: Any, text: str) -> None:
    check_spans(blanks, blanks.encode(text, add_special_tokens=False))


def test_a_character_of_several_tokens_belongs_to_all_of_them() -> None:
    tokenizer = make_tokenizer("qwen3")
    ids = tokenizer.encode("a🙂b", add_special_tokens=False)
    starts = find_token_starts(tokenizer, ids, "a🙂b")
    assert starts == [0, 1, 1, 1, 1, 2]
    assert find_token_span(starts, 1, 2) == (1, 5)

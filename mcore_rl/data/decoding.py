"""Decodes responses as a tokenizer does, in processes that need not import transformers."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

Decode = Callable[[Sequence[int]], str]


def make_decode(tokenizer: Any) -> Decode:
    """Return a picklable function that decodes tokens without the special ones.

    tokenizer   of transformers. Where its text is that of the library `tokenizers`, unchanged, the
                function needs that library only.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.clean_up_tokenization_spaces or _is_special(tokenizer):
        return partial(_decode, tokenizer)
    return partial(_decode_by_backend, backend)


def _is_special(tokenizer: Any) -> bool:
    """Return whether the tokenizer's class decodes in a way of its own."""
    return any(
        "_decode" in vars(base) or "decode" in vars(base)
        for base in type(tokenizer).__mro__
        if not base.__module__.startswith("transformers.tokenization_utils")
    )


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


def _decode_by_backend(backend: Any, token_ids: Sequence[int]) -> str:
    return backend.decode(list(token_ids), skip_special_tokens=True)

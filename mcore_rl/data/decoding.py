"""Decodes responses as a tokenizer does, in processes that need not import transformers."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

Decode = Callable[[Sequence[int]], str]
CODE = "transformers_modules."
"""The package to which transformers copies code that lies beside models."""


def make_decode(tokenizer: Any) -> Decode:
    """Return a picklable function that decodes tokens without the special ones.

    A tokenizer that is code beside a model is opened anew in each process, as its class cannot be
    imported there under the name that it has here.

    tokenizer   of transformers. Where its text is that of the library `tokenizers`, unchanged, the
                function needs that library only.
    """
    if type(tokenizer).__module__.startswith(CODE):
        return partial(_decode_by_code, str(Path(tokenizer.name_or_path).resolve()))
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


@cache
def _open_code(folder: str) -> Any:
    """Return a tokenizer whose code this run trusts, as another process of it has opened it."""
    from mcore_rl.data.tokenizer import load_tokenizer

    return load_tokenizer(folder, "model.path", trust_remote_code=True)


def _decode_by_code(folder: str, token_ids: Sequence[int]) -> str:
    return _decode(_open_code(folder), token_ids)


def _decode_by_backend(backend: Any, token_ids: Sequence[int]) -> str:
    return backend.decode(list(token_ids), skip_special_tokens=True)

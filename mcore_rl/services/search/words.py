"""Splits passages and queries into the words that BM25 counts."""

import hashlib
import re
from collections.abc import Sequence

import numpy as np

_WORD = re.compile(r"\w+")
_FREQUENT = """
a an and are as at be but by for from had has have he her his if in into is it its not of on
or she such that the their then there these they this to was were will with
"""
STOP_WORDS = frozenset(_FREQUENT.split())
"""English words that nearly every passage has; they cost much time and tell nothing."""


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, in their order, without the stop words."""
    return [word for word in _WORD.findall(text.lower()) if word not in STOP_WORDS]


def hash_words(words: Sequence[str]) -> np.ndarray:
    """Return a uint64 for each word. Two of a million words collide with a chance of 3e-8."""
    digests = [hashlib.blake2b(word.encode(errors="replace"), digest_size=8) for word in words]
    return np.frombuffer(b"".join(digest.digest() for digest in digests), dtype="<u8")

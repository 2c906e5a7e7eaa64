"""BM25 over one shard of a corpus, by the package bm25s, with all arrays memory-mapped.

texts --words--> (word, passage) counts --> scores per word, sorted by word --> files of bm25s

bm25s builds its arrays from Python lists, passage by passage; sorting all pairs at once takes a
tenth of the time. The files can be opened by bm25s itself, and scores are those that it computes.

Splits passages and queries into the words that BM25 counts.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

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


K1 = 1.5
B = 0.75
_HASHES = "words.npy"
_IDS = "word_ids.npy"


def build_bm25(texts: Sequence[str], folder: Path) -> None:
    """Write the index of `texts` to `folder`; takes about 40 bytes of memory a word."""
    import bm25s

    ids: defaultdict[str, int] = defaultdict()
    ids.default_factory = ids.__len__
    words = [np.fromiter((ids[word] for word in words_of(text)), np.int64) for text in texts]
    lengths = np.array([len(found) for found in words], dtype=np.int64)
    index = bm25s.BM25(k1=K1, b=B, method="lucene")
    index.scores = _score(words, lengths, len(ids))
    index.nonoccurrence_array = None  # only other formulas have one
    index.vocab_dict = dict(ids)
    index.save(folder, show_progress=False)
    hashes = hash_words(list(ids))
    order = np.argsort(hashes)
    np.save(folder / _HASHES, hashes[order])
    np.save(folder / _IDS, order.astype(np.int32))


def _score(words: Sequence[np.ndarray], lengths: np.ndarray, num_words: int) -> dict[str, object]:
    """Return bm25s's arrays: for each word its passages and what it adds to their scores.

    The formula is that of Lucene: idf * tf / (tf + k1 * (1 - b + b * length / mean length)).
    """
    num_docs = len(lengths)
    flat = np.concatenate(words) if num_docs else np.empty(0, np.int64)
    flat *= num_docs
    flat += np.repeat(np.arange(num_docs), lengths)
    pairs, counts = np.unique(flat, return_counts=True)
    of_word, of_doc = np.divmod(pairs, max(num_docs, 1))
    frequency = np.bincount(of_word, minlength=num_words)
    idf = np.log1p((num_docs - frequency + 0.5) / (frequency + 0.5))
    length = lengths / max(lengths.mean(), 1e-9) if num_docs else lengths
    damping = K1 * (1 - B + B * length)
    indptr = np.zeros(num_words + 1, dtype=np.int64)
    np.cumsum(frequency, out=indptr[1:])
    return {
        "data": (idf[of_word] * counts / (counts + damping[of_doc])).astype(np.float32),
        "indices": of_doc.astype(np.int32),
        "indptr": indptr,
        "num_docs": num_docs,
    }


class Bm25Shard:
    """An index that `build_bm25` wrote. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        import bm25s

        self._index = bm25s.BM25.load(folder, mmap=True, load_vocab=False)
        self._hashes = np.load(folder / _HASHES, mmap_mode="r")
        self._ids = np.load(folder / _IDS, mmap_mode="r")

    def top(self, query: str, num: int) -> list[tuple[int, float]]:
        """Return (passage, score) of at most `num` passages that have a word of the query.

        The best come first; of equal ones, the first of the corpus.
        """
        ids = self._find_known(query)
        if not ids:
            return []
        return best_of(self._index.get_scores_from_ids(ids), num)

    def _find_known(self, query: str) -> list[int]:
        hashes = hash_words(words_of(query))
        if not len(hashes) or not len(self._hashes):
            return []
        places = np.searchsorted(self._hashes, hashes).clip(max=len(self._hashes) - 1)
        return self._ids[places[self._hashes[places] == hashes]].tolist()


def best_of(scores: np.ndarray, num: int) -> list[tuple[int, float]]:
    """Return (index, score) of the `num` highest scores above 0, of equal ones the first."""
    num = min(num, len(scores))
    if not num:
        return []
    least = np.partition(scores, len(scores) - num)[len(scores) - num]
    above = np.flatnonzero(scores > max(least, 0))
    equal = np.flatnonzero(scores == least)[: num - len(above)] if least > 0 else above[:0]
    found = np.concatenate([above, equal])
    order = np.lexsort((found, -scores[found]))
    return [(int(found[i]), float(scores[found[i]])) for i in order[:num]]

"""The two ways to find passages, by words and by vectors, over the shards of a corpus.

words     texts --> (word, passage) counts --> scores per word, sorted by word --> files of bm25s
vectors   texts --HuggingFace encoder--> vectors of length 1 --> flat faiss indexes on disk

The package bm25s builds its arrays from Python lists, passage by passage; sorting all pairs at once
takes a tenth of the time. The files can be opened by bm25s itself, and scores are those that it
computes.

faiss is no part of the default installation. Vectors are normalized, so scores are cosines. A flat
index is exact: a query reads every vector, num_passages * size * 4 bytes of the mapped files.
"""

import hashlib
import importlib.util
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mcore_rl.services.search.layout import EncoderOptions

_WORD = re.compile(r"\w+")
_FREQUENT = """
a an and are as at be but by for from had has have he her his if in into is it its not of on
or she such that the their then there these they this to was were will with
"""
STOP_WORDS = frozenset(_FREQUENT.split())
"""English words that nearly every passage has; they cost much time and tell nothing."""
K1 = 1.5
B = 0.75
_HASHES = "words.npy"
_IDS = "word_ids.npy"
_VECTORS = "vectors.faiss"
_BATCH_LEN = 32


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


class Encoder:
    """A HuggingFace model that turns texts into vectors of length 1, on the CPU."""

    def __init__(self, options: EncoderOptions) -> None:
        """Load the model. Raises ValueError if it cannot be loaded."""
        from transformers import AutoModel, AutoTokenizer

        self._options = options
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(options.model)
            self._model: Any = AutoModel.from_pretrained(options.model).eval()
        except (OSError, ValueError) as error:
            raise ValueError(f"--encoder={options.model}: it cannot be loaded: {error}") from error

    def passages(self, texts: Sequence[str]) -> np.ndarray:
        """Return the vectors of passages, float32 [texts, size]."""
        return self._encode([self._options.passage_prefix + text for text in texts])

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """Return the vectors of queries, float32 [texts, size]."""
        return self._encode([self._options.query_prefix + text for text in texts])

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        import torch

        batches = []
        for start in range(0, len(texts), _BATCH_LEN):
            inputs = self._tokenizer(
                list(texts[start : start + _BATCH_LEN]),
                max_length=self._options.max_len,
                padding=True,
                truncation=True,
                return_tensors="pt",
            )
            with torch.inference_mode():
                states = self._model(**inputs).last_hidden_state
            if self._options.pooling == "cls":
                pooled = states[:, 0]
            else:
                mask = inputs["attention_mask"][..., None]
                pooled = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
            batches.append(torch.nn.functional.normalize(pooled.float(), dim=-1).numpy())
        return np.concatenate(batches)


class DenseShards:
    """The vectors of all shards of an index. Threads may share it."""

    def __init__(self, encoder: Encoder, folders: Sequence[Path]) -> None:
        """`folders`: those that `build_dense` wrote, in the order of the corpus."""
        import faiss  # pyright: ignore[reportMissingImports]

        self._encoder = encoder
        self._shards = [
            faiss.read_index(str(folder / _VECTORS), faiss.IO_FLAG_MMAP_IFC) for folder in folders
        ]
        self._firsts = np.cumsum([0, *(shard.ntotal for shard in self._shards)]).tolist()

    def top(self, queries: Sequence[str], num: int) -> list[list[tuple[int, float]]]:
        """Return for each query (passage, cosine) of the `num` nearest, the nearest first."""
        if not queries:
            return []
        vectors = self._encoder.queries(queries)
        found: list[list[tuple[int, float]]] = [[] for _ in queries]
        for first, shard in zip(self._firsts, self._shards, strict=False):
            scores, places = shard.search(vectors, min(num, shard.ntotal))
            for ranking, row_scores, row_places in zip(found, scores, places, strict=True):
                ranking += [
                    (first + int(place), float(score))
                    for place, score in zip(row_places, row_scores, strict=True)
                ]
        return [sorted(each, key=lambda item: (-item[1], item[0]))[:num] for each in found]


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


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, in their order, without the stop words."""
    return [word for word in _WORD.findall(text.lower()) if word not in STOP_WORDS]


def hash_words(words: Sequence[str]) -> np.ndarray:
    """Return a uint64 for each word. Two of a million words collide with a chance of 3e-8."""
    digests = [hashlib.blake2b(word.encode(errors="replace"), digest_size=8) for word in words]
    return np.frombuffer(b"".join(digest.digest() for digest in digests), dtype="<u8")


def build_dense(encoder: Encoder, texts: Sequence[str], folder: Path) -> None:
    """Write the vectors of `texts` to `folder`."""
    import faiss  # pyright: ignore[reportMissingImports]

    vectors = encoder.passages(texts)
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    folder.mkdir()
    faiss.write_index(index, str(folder / _VECTORS))


def refuse_missing_faiss() -> None:
    """Raise ValueError, with the remedy, if faiss is not installed."""
    if importlib.util.find_spec("faiss") is None:
        raise ValueError("dense vectors need faiss: pip install faiss-cpu")

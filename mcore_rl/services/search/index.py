"""Opens a finished index and finds passages in it: by words, by vectors, or by both.

query --> top of each shard --merged by score--> passages of the memory-mapped corpus

Rankings by words and by vectors are fused by the ranks of their passages.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mcore_rl.services.search.layout import (
    MANIFEST,
    OFFSETS,
    OPTIONS,
    SHARD,
    Hit,
    IndexOptions,
    MappedFile,
    Row,
    ShardFacts,
    compute_digest,
    name_shard_folder,
)
from mcore_rl.services.search.methods import Bm25Shard

RANK_OFFSET = 60
"""Constant k of reciprocal rank fusion (Cormack, Clarke and Buettcher, SIGIR 2009)."""


def fuse(rankings: Sequence[Sequence[int]], num: int) -> list[tuple[int, float]]:
    """Return (passage, score) of the `num` best passages of all rankings, the best first.

    A passage's score is the sum of 1 / (60 + rank) over the rankings that have it, with ranks from
    1 on; of equal passages the one with the lower number comes first.
    """
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, passage in enumerate(ranking, start=1):
            scores[passage] = scores.get(passage, 0.0) + 1.0 / (RANK_OFFSET + rank)
    best = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
    return best[:num]


_FUSED_DEPTH = 4
"""A fusion looks at so many times more passages of each ranking than it returns."""


class Retriever(Protocol):
    """Whatever finds passages for queries. Threads may share it."""

    @property
    def name(self) -> str:
        """Return what it is, for people: bm25, dense, hybrid or web."""
        ...

    @property
    def num_passages(self) -> int:
        """Return how many passages there are; 0: nobody knows."""
        ...

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return for each query at most `topk` hits, the best first."""
        ...


class ShardedVectors(Protocol):
    """The dense part of an index."""

    def top(self, queries: Sequence[str], num: int) -> list[list[tuple[int, float]]]: ...


@dataclass(frozen=True)
class _Shard:
    facts: ShardFacts
    offsets: np.ndarray
    words: Bm25Shard


class PassageIndex:
    """A finished index; a Retriever."""

    def __init__(
        self, folder: Path, method: str = "bm25", vectors: ShardedVectors | None = None
    ) -> None:
        """Open an index. `vectors` are needed for the methods dense and hybrid.

        Raises ValueError if it is not finished or not whole, or if its corpus is another now.
        """
        assert (method == "bm25") == (vectors is None), method
        manifest = read_manifest(folder)
        self._method = method
        self._vectors = vectors
        self._shards = [_open_shard(folder, i) for i in range(len(manifest["shards"]))]
        self._corpus = MappedFile(Path(manifest["corpus"]))
        self._firsts = np.array([shard.facts.first_passage for shard in self._shards])
        self._num_passages = manifest["passages"]

    @property
    def name(self) -> str:
        return self._method

    @property
    def num_passages(self) -> int:
        return self._num_passages

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """See Retriever."""
        return [
            [Hit(self._row(passage), score) for passage, score in ranking]
            for ranking in self._rank(queries, topk)
        ]

    def close(self) -> None:
        self._corpus.close()

    def _rank(self, queries: Sequence[str], topk: int) -> list[list[tuple[int, float]]]:
        if self._vectors is None:
            return [self._rank_by_words(query, topk) for query in queries]
        if self._method == "dense":
            return self._vectors.top(queries, topk)
        depth = topk * _FUSED_DEPTH
        by_vectors = self._vectors.top(queries, depth)
        return [
            fuse([_passages(self._rank_by_words(query, depth)), _passages(found)], topk)
            for query, found in zip(queries, by_vectors, strict=True)
        ]

    def _rank_by_words(self, query: str, num: int) -> list[tuple[int, float]]:
        found = [
            (shard.facts.first_passage + place, score)
            for shard in self._shards
            for place, score in shard.words.top(query, num)
        ]
        return sorted(found, key=lambda item: (-item[1], item[0]))[:num]

    def _row(self, passage: int) -> Row:
        number = int(np.searchsorted(self._firsts, passage, side="right")) - 1
        shard = self._shards[number]
        place = passage - shard.facts.first_passage
        start, stop = shard.offsets[place : place + 2].tolist()
        return self._corpus.row(start, stop)


def _passages(ranking: Sequence[tuple[int, float]]) -> list[int]:
    return [passage for passage, _ in ranking]


def _open_shard(folder: Path, number: int) -> _Shard:
    path = name_shard_folder(folder, number)
    offsets = np.load(path / OFFSETS, mmap_mode="r")
    return _Shard(ShardFacts.read(path), offsets, Bm25Shard(path / "bm25"))


def read_options(folder: Path) -> IndexOptions:
    """Return the options of an index. Raises ValueError if the folder holds none."""
    read_manifest(folder)
    return IndexOptions.from_json(json.loads((folder / OPTIONS).read_text()))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a finished index whose files have the right sizes, or ValueError."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"--index={folder}: no finished index, as there is no {MANIFEST}; build one by"
            f" mcore-rl search build --corpus=... --out={folder}, which goes on where it stopped"
        )
    manifest = json.loads(path.read_text())
    corpus = Path(manifest["corpus"])
    size = corpus.stat().st_size if corpus.is_file() else -1
    if size != manifest["corpus_bytes"]:
        raise ValueError(
            f"--index={folder}: its corpus {corpus} has {max(size, 0)} bytes, not"
            f" {manifest['corpus_bytes']}: put the corpus back, or build the index again"
        )
    for number in range(len(manifest["shards"])):
        _check_sizes(name_shard_folder(folder, number))
    return manifest


def verify(folder: Path) -> None:
    """Compare every byte of an index and its corpus with the digests of the build.

    Raises ValueError naming the first file that differs.
    """
    manifest = read_manifest(folder)
    corpus = Path(manifest["corpus"])
    for number, digest in enumerate(manifest["shards"]):
        path = name_shard_folder(folder, number)
        _refuse(compute_digest(path / SHARD) != digest, path / SHARD)
        facts = ShardFacts.read(path)
        for name, (_, expected) in facts.files.items():
            _refuse(compute_digest(path / name) != expected, path / name)
        _refuse(compute_digest(corpus, facts.start, facts.stop) != facts.corpus_digest, corpus)


def _check_sizes(path: Path) -> None:
    for name, (num_bytes, _) in ShardFacts.read(path).files.items():
        file = path / name
        _refuse(not file.is_file() or file.stat().st_size != num_bytes, file)


def _refuse(is_wrong: bool, path: Path) -> None:
    if is_wrong:
        raise ValueError(
            f"{path} is missing or not what the build wrote: delete the index and build it again,"
            " or put the file back"
        )

"""The files of an index and of its corpus: what lies where, and what says that all of it is there.

corpus.jsonl         a passage a line: `id`, and `contents` that begin with the title (Search-R1)
index/
  options.json       the options of the build; every shard has the same
  shard-00000/       one per so many passages: offsets.npy, bm25/, dense/ and shard.json
  manifest.json      written last: an index without it is not finished
"""

import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
"""A line of the corpus: id, contents, and whatever else it has."""
_SHOWN_LEN = 80


@dataclass(frozen=True)
class Hit:
    """A passage that was found, and its score: the higher, the better."""

    document: Row
    score: float


@dataclass(frozen=True)
class Line:
    """A row of a corpus and the bytes that it takes, its newline included."""

    start: int
    stop: int
    row: Row


def read_lines(corpus: Path, start: int = 0, first_number: int = 1) -> Iterator[Line]:
    """Yield the rows from byte `start` on, which is the beginning of line `first_number`.

    Raises ValueError naming file and line if a row is broken.
    """
    with corpus.open("rb") as file:
        file.seek(start)
        for number, raw in enumerate(file, start=first_number):
            yield Line(start, start + len(raw), parse_row(raw, f"{corpus}:{number}"))
            start += len(raw)


def parse_row(raw: bytes, place: str) -> Row:
    """Return a row of a corpus. Raises ValueError, which begins with `place`, if it is broken."""
    try:
        row = json.loads(raw)
    except ValueError as error:
        raise ValueError(_complaint(place, raw, f"is not JSON ({error})")) from None
    if not isinstance(row, dict):
        raise ValueError(_complaint(place, raw, "is not a JSON object"))
    if not isinstance(row.get("contents"), str) or not row["contents"].strip():
        raise ValueError(_complaint(place, raw, "has no text as `contents`"))
    if not isinstance(row.get("id"), str | int):
        raise ValueError(_complaint(place, raw, "has neither text nor a number as `id`"))
    return row


def _complaint(place: str, raw: bytes, problem: str) -> str:
    shown = raw[:_SHOWN_LEN].decode(errors="replace").rstrip()
    return (
        f'{place}: the line {problem}: {shown!r}; each line must be {{"id": ..., "contents": '
        '"title\\ntext"}: mend it or leave it out, then run the same command again'
    )


class MappedFile:
    """The bytes of a file, mapped: the kernel drops pages that nobody reads."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._bytes = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def row(self, start: int, stop: int) -> Row:
        """Return the row of a corpus that lies at these bytes."""
        return json.loads(self._bytes[start:stop])

    def close(self) -> None:
        self._bytes.close()
        self._file.close()


def split_title(row: Row) -> tuple[str, str]:
    """Return a passage's title, without quotation marks around it, and its text."""
    title, _, text = str(row.get("contents") or "").partition("\n")
    return title.strip('"'), text


METHODS = ("bm25", "dense", "hybrid")
"""Ways to find passages in an index."""
OPTIONS = "options.json"
MANIFEST = "manifest.json"
SHARD = "shard.json"
OFFSETS = "offsets.npy"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class EncoderOptions:
    """The model that turns texts into vectors.

    model            HuggingFace directory or name on the hub
    pooling          mean of all tokens' states, or cls: that of the first token
    max_len          tokens of a text; the rest is cut off
    query_prefix, passage_prefix
                     said before each text, such as "query: " for E5
    """

    model: str
    pooling: str = "mean"
    max_len: int = 256
    query_prefix: str = ""
    passage_prefix: str = ""

    def __post_init__(self) -> None:
        if self.pooling not in ("mean", "cls"):
            raise ValueError(f"--pooling={self.pooling}: mean or cls")
        if self.max_len < 1:
            raise ValueError(f"--max-len={self.max_len}: at least 1 token")


@dataclass(frozen=True)
class IndexOptions:
    """How an index is built.

    shard_len   passages of a shard; memory grows with it
    encoder     for dense vectors besides the words; None: words only
    """

    shard_len: int = 200_000
    encoder: EncoderOptions | None = None

    def __post_init__(self) -> None:
        if self.shard_len < 1:
            raise ValueError(f"--shard-len={self.shard_len}: at least 1 passage")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "IndexOptions":
        encoder = value["encoder"]
        return IndexOptions(value["shard_len"], EncoderOptions(**encoder) if encoder else None)


@dataclass(frozen=True)
class ShardFacts:
    """A finished shard: the bytes and passages of the corpus that it holds, and its files.

    corpus_digest   of those bytes
    files           path in the shard's folder -> (bytes, digest)
    """

    start: int
    stop: int
    first_passage: int
    num_passages: int
    corpus_digest: str
    files: Mapping[str, tuple[int, str]]

    @staticmethod
    def read(folder: Path) -> "ShardFacts":
        """Read those of a shard. Raises ValueError if its file is missing or damaged."""
        path = folder / SHARD
        try:
            value = json.loads(path.read_text())
            value["files"] = {name: tuple(facts) for name, facts in value["files"].items()}
            return ShardFacts(**value)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is missing or not what the build wrote ({error!r}): delete"
                f" {folder} and run the build again, which makes it anew"
            ) from error


def name_shard_folder(index: Path, number: int) -> Path:
    return index / f"shard-{number:05d}"


def write_json(path: Path, value: Any) -> None:
    """Write a file that is there whole or not at all, also after the power fails."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the disk keep the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Have the disk keep a file's bytes."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def compute_digest(path: Path, start: int = 0, stop: int | None = None) -> str:
    """Return the digest of a file's bytes from `start` to `stop`, or to its end."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        file.seek(start)
        left = (path.stat().st_size if stop is None else stop) - start
        while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()


def list_facts(folder: Path) -> dict[str, tuple[int, str]]:
    """Return path -> (bytes, digest) of the files below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SHARD)
    return {
        str(path.relative_to(folder)): (path.stat().st_size, compute_digest(path)) for path in files
    }

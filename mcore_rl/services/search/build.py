"""Builds an index of a corpus, shard by shard; a build that was killed goes on where it was.

corpus.jsonl --rows--> shard-00000.tmp/ --synced, renamed--> shard-00000/ ... --> manifest.json

Memory is bounded by a shard. A shard is there whole or not at all, with a digest of each file and
of the bytes of the corpus that it was made from.
"""

import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from mcore_rl.process.disk import report_full_disk
from mcore_rl.process.file_lock import LockedError, hold_lock
from mcore_rl.services.search.layout import (
    MANIFEST,
    OFFSETS,
    OPTIONS,
    SHARD,
    IndexOptions,
    Line,
    ShardFacts,
    compute_digest,
    list_facts,
    name_shard_folder,
    read_lines,
    sync_file,
    sync_folder,
    write_json,
)
from mcore_rl.services.search.methods import build_bm25

Report = Callable[[int, int], None]
"""Gets the bytes of the corpus that are done, and how many there are."""
Encode = Callable[[Sequence[str], Path], None]
"""Writes the vectors of texts to a folder."""


def build_index(
    corpus: Path,
    out: Path,
    options: IndexOptions,
    encode: Encode | None,
    report: Report = lambda done, total: None,
) -> int:
    """Build the index of a corpus in folder `out`, or finish it; return the number of passages.

    `encode` is needed if the options have an encoder. Raises ValueError if the corpus is empty or
    has a broken row, if `out` holds the index of another corpus or of other options, or if another
    process builds it.
    """
    if not corpus.is_file() or not corpus.stat().st_size:
        raise ValueError(f"--corpus={corpus}: there is no such file, or it is empty")
    out.mkdir(parents=True, exist_ok=True)
    try:
        with hold_lock(out / "build.lock"), report_full_disk(out):
            _keep_options(out, options)
            shards = _build_shards(corpus, out, options, encode, report)
            num_passages = sum(shard.num_passages for shard in shards)
            write_json(out / MANIFEST, _manifest(corpus, out, shards))
            return num_passages
    except LockedError as error:
        raise ValueError(f"--out={out}: another build writes it ({error.holder})") from error


def _keep_options(out: Path, options: IndexOptions) -> None:
    path = out / OPTIONS
    if not path.exists():
        write_json(path, options.to_json())
        return
    before = IndexOptions.from_json(json.loads(path.read_text()))
    if before != options:
        raise ValueError(
            f"--out={out} holds an index of other options: {before}, not {options}; give the same,"
            " another folder, or delete it"
        )


def _build_shards(
    corpus: Path, out: Path, options: IndexOptions, encode: Encode | None, report: Report
) -> list[ShardFacts]:
    total = corpus.stat().st_size
    shards = list(_iter_finished(corpus, out))
    start, first = (shards[-1].stop, _end(shards[-1])) if shards else (0, 0)
    report(start, total)
    lines = read_lines(corpus, start, first + 1)
    while batch := list(itertools.islice(lines, options.shard_len)):
        folder = name_shard_folder(out, len(shards))
        shards.append(_build_shard(corpus, folder, batch, first, encode))
        first = _end(shards[-1])
        report(shards[-1].stop, total)
    return shards


def _end(shard: ShardFacts) -> int:
    return shard.first_passage + shard.num_passages


def _iter_finished(corpus: Path, out: Path) -> Iterator[ShardFacts]:
    """Yield the shards that an earlier build finished, as far as the corpus is still theirs.

    A corpus that was mended behind them keeps them.
    """
    for number in itertools.count():
        folder = name_shard_folder(out, number)
        if not folder.exists():
            return
        shard = ShardFacts.read(folder)
        if compute_digest(corpus, shard.start, shard.stop) != shard.corpus_digest:
            raise ValueError(
                f"--out={out} holds an index of another corpus: the bytes {shard.start} to"
                f" {shard.stop} of {corpus} are not those of {folder.name}; give another folder,"
                " or delete it"
            )
        yield shard


def _build_shard(
    corpus: Path, folder: Path, lines: Sequence[Line], first: int, encode: Encode | None
) -> ShardFacts:
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    texts = [line.row["contents"] for line in lines]
    offsets = np.array([*(line.start for line in lines), lines[-1].stop], dtype=np.uint64)
    np.save(temporary / OFFSETS, offsets)
    build_bm25(texts, temporary / "bm25")
    if encode is not None:
        encode(texts, temporary / "dense")
    start, stop = lines[0].start, lines[-1].stop
    facts = ShardFacts(
        start, stop, first, len(lines), compute_digest(corpus, start, stop), list_facts(temporary)
    )
    write_json(temporary / SHARD, asdict(facts))
    for name in facts.files:
        sync_file(temporary / name)
    temporary.rename(folder)
    sync_folder(folder.parent)
    return facts


def _manifest(corpus: Path, out: Path, shards: Sequence[ShardFacts]) -> dict[str, object]:
    return {
        "corpus": str(corpus.resolve()),
        "corpus_bytes": shards[-1].stop,
        "passages": _end(shards[-1]),
        "shards": [compute_digest(name_shard_folder(out, i) / SHARD) for i in range(len(shards))],
    }

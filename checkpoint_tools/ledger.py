"""Checks the bytes read from source files against checksums, and names the tensor that is wrong.

A checksum may cover several reads: for example, a matrix may be split into three tensors. The
checksums of these reads are combined once all of them were added.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

from zlib_ng import zlib_ng

from checkpoint_tools.reader import ReadRecord
from checkpoint_tools.stored import Checkpoint, Chunk
from mcore_rl.weights.hf.checksums import MANIFEST, ByteSpan, FileSums


class Ledger:
    """Compares what was read with checksums.json, or else with the archives' own checksums."""

    def __init__(self, checkpoints: Iterable[Checkpoint]) -> None:
        self._sums: dict[str, FileSums] = {}
        by_path: dict[str, list[Chunk]] = defaultdict(list)
        for checkpoint in checkpoints:
            for tensor in checkpoint.tensors.values():
                for chunk in tensor.chunks:
                    by_path[chunk.path].append(chunk)
            for file, sums in (checkpoint.sums or {}).items():
                self._sums[str(checkpoint.folder / file)] = sums
        self._chunks: dict[str, tuple[list[int], list[Chunk]]] = {}
        for path, chunks in by_path.items():
            chunks.sort(key=lambda chunk: (chunk.start, chunk.num_bytes))
            self._chunks[path] = ([chunk.start for chunk in chunks], chunks)
        self._starts = {
            path: [span.start for span in sums.spans] for path, sums in self._sums.items()
        }
        self._promised: dict[tuple[str, int], ByteSpan] = {}
        self._read: dict[tuple[str, int], dict[int, ByteSpan]] = defaultdict(dict)
        self.num_checked = 0

    def add(self, record: ReadRecord) -> None:
        """Enter what was read. Raises ValueError with the file and tensor of a wrong checksum."""
        for path, spans in record.promised.items():
            if path not in self._sums:
                for span in spans:
                    chunk = self._chunk_at(path, span.start)
                    assert chunk is not None
                    self._promised[path, chunk.start] = span
        for path, spans in record.read.items():
            for span in spans:
                self._add(path, span)

    def close(self) -> None:
        """Raise ValueError, for an error of ours, if only part of a checksum's bytes was read."""
        for (path, start), reads in self._read.items():
            num_read = sum(span.num_bytes for span in reads.values())
            raise ValueError(
                f"{self._where(path, start)}: only {num_read} bytes of its checksum's were read"
            )

    def _add(self, path: str, span: ByteSpan) -> None:
        expected = self._find_covering(path, span)
        if expected is None:
            return
        key = (path, expected.start)
        reads = self._read[key]
        if span.start in reads and reads[span.start] != span:
            raise ValueError(
                f"{self._where(path, expected.start)}: two reads of the same bytes differ"
            )
        reads[span.start] = span
        if sum(read.num_bytes for read in reads.values()) == expected.num_bytes:
            del self._read[key]
            self._compare(path, expected, sorted(reads.values(), key=lambda read: read.start))

    def _find_covering(self, path: str, span: ByteSpan) -> ByteSpan | None:
        """Return the recorded checksum whose bytes include those of a read, or None."""
        if path in self._sums:
            number = bisect_right(self._starts[path], span.start) - 1
            return self._sums[path].spans[number]
        chunk = self._chunk_at(path, span.start)
        promised = self._promised.get((path, chunk.start)) if chunk else None
        if promised is None or not promised.start <= span.start < promised.stop:
            return None
        return promised

    def _compare(self, path: str, expected: ByteSpan, reads: list[ByteSpan]) -> None:
        at = expected.start
        crc32 = 0
        for read in reads:
            assert read.start == at, f"{path}: byte {at} was not read"
            crc32 = zlib_ng.crc32_combine(crc32, read.crc32, read.num_bytes)
            at = read.stop
        if crc32 != expected.crc32:
            source = MANIFEST if path in self._sums else "the archive's own"
            raise ValueError(
                f"{self._where(path, expected.start)}: its checksum is {crc32:08x}, by {source} it"
                f" should be {expected.crc32:08x}: the file is damaged"
            )
        self.num_checked += 1

    def _where(self, path: str, start: int) -> str:
        chunk = self._chunk_at(path, start)
        return chunk.where if chunk else f"{path}: bytes from {start} on"

    def _chunk_at(self, path: str, start: int) -> Chunk | None:
        """Return the chunk that a byte of a file belongs to, or None."""
        starts, chunks = self._chunks.get(path, ((), ()))
        number = bisect_right(starts, start) - 1
        if number < 0:
            return None
        chunk = chunks[number]
        return chunk if start < chunk.start + chunk.num_bytes else None

"""Reads in any order and cut are combined and compared with checksums.json or the archive's own."""

import random
import zlib
from itertools import pairwise
from pathlib import Path

import pytest

from checkpoint_tools.ledger import Ledger
from checkpoint_tools.reader import ReadRecord
from checkpoint_tools.stored import Checkpoint, Chunk, StoredTensor
from mcore_rl.weights.hf.checksums import ByteSpan, FileSums

CONTENT = bytes(range(100))


def checkpoint(with_sums: bool) -> Checkpoint:
    chunk = Chunk("t", "uint8", (0,), (100,), "/f/file", 0, 100, False)
    tensor = StoredTensor("t", "uint8", (100,), (chunk,))
    sums = {"file": FileSums(100, (ByteSpan(0, 100, zlib.crc32(CONTENT)),))} if with_sums else None
    return Checkpoint("hf", Path("/f"), {"t": tensor}, (), sums)


def read(start: int, stop: int, content: bytes = CONTENT) -> ByteSpan:
    return ByteSpan(start, stop - start, zlib.crc32(content[start:stop]))


def record_of(*spans: ByteSpan) -> ReadRecord:
    record = ReadRecord()
    record.read["/f/file"] += spans
    return record


@pytest.mark.parametrize("seed", range(5))
def test_reads_of_any_cut_and_order_agree(seed: int) -> None:
    rng = random.Random(seed)
    edges = sorted({0, 100, *(rng.randrange(1, 100) for _ in range(6))})
    spans = [read(a, b) for a, b in pairwise(edges)]
    rng.shuffle(spans)
    ledger = Ledger([checkpoint(with_sums=True)])
    for span in spans:
        assert ledger.num_checked == 0
        ledger.add(record_of(span))
    ledger.close()
    assert ledger.num_checked == 1


def test_another_byte_is_refused_with_the_tensor() -> None:
    changed = bytes([CONTENT[0] ^ 1]) + CONTENT[1:]
    ledger = Ledger([checkpoint(with_sums=True)])
    ledger.add(record_of(read(50, 100)))
    with pytest.raises(ValueError, match=r"/f/file: tensor 't': .* by checksums\.json it should"):
        ledger.add(record_of(read(0, 50, changed)))


def test_without_checksums_the_archive_is_believed() -> None:
    record = record_of(read(10, 90))
    record.promised["/f/file"].append(ByteSpan(10, 80, zlib.crc32(CONTENT[10:90])))
    ledger = Ledger([checkpoint(with_sums=False)])
    ledger.add(record)
    assert ledger.num_checked == 1
    wrong = record_of(read(10, 90))
    wrong.promised["/f/file"].append(ByteSpan(10, 80, 7))
    with pytest.raises(ValueError, match="by the archive's own it should be 00000007"):
        Ledger([checkpoint(with_sums=False)]).add(wrong)


def test_a_checksum_read_in_part_is_an_error() -> None:
    ledger = Ledger([checkpoint(with_sums=True)])
    ledger.add(record_of(read(0, 30)))
    with pytest.raises(ValueError, match="only 30 bytes of its checksum's were read"):
        ledger.close()

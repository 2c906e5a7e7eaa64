"""A rank whose state is its share of sixty bytes, which a step of training adds 1 to."""

import mmap
from collections.abc import Mapping, Sequence

from mcore_rl.process.kept_copies import Header, Span, decode_index, encode_index, plan_reads
from mcore_rl.process.kept_memory import HEADER_BYTES, map_kept
from mcore_rl.workers.model_worker import ModelSpec
from tests.support.cluster_workers import Place

STATE = bytes(range(60))


class KeptWorker:
    """Keeps copies as ranks of a model do, of a state that data parallelism divides."""

    def __init__(self, spec: ModelSpec, rank: int, *_: object) -> None:
        size = spec.parallel.dp_size
        self._rank = rank
        self._start, self._stop = 60 * rank // size, 60 * (rank + 1) // size
        self._state = STATE[self._start : self._stop]
        self._index = encode_index([Span("state", self._start, self._stop, HEADER_BYTES)])
        self._end = HEADER_BYTES + len(self._state)
        self._paths: Sequence[str] = ()

    def close(self, timeout_s: float) -> None:
        """End what is under way beside calls, as a rank of a model does."""

    def coordinate(self) -> Place:
        return Place(dp=self._rank, tp=0, owns_output=True)

    def train(self) -> None:
        self._state = bytes(value + 1 for value in self._state)

    def tell(self) -> bytes:
        return self._state

    def count_kept_bytes(self) -> int:
        return self._end + len(self._index)

    def read_kept_index(self) -> bytes:
        return self._index

    def use_kept_memory(self, paths: Sequence[str]) -> None:
        self._paths = paths

    def keep_state(self, step: int) -> tuple[int, int]:
        with map_kept(self._paths[step % 2]) as piece:
            piece[HEADER_BYTES : self._end] = self._state
            self._complete(piece, step)
        return step % 2, len(self._state)

    def compose_state(self, step: int, paths: Mapping[str, str], like: str) -> int:
        assert like in paths
        sources = {name: map_kept(path) for name, path in paths.items()}
        held = {}
        for name, source in sources.items():
            header = Header.parse(source[:HEADER_BYTES])
            assert header is not None and header.step == step
            held[name] = decode_index(source[header.index : header.num_bytes])
        with map_kept(self._paths[step % 2]) as piece:
            for read in plan_reads(decode_index(self._index), held):
                content = sources[read.source][read.start : read.start + read.num_bytes]
                piece[read.place : read.place + read.num_bytes] = content
            self._complete(piece, step)
        return step % 2

    def _complete(self, piece: mmap.mmap, step: int) -> None:
        end = self._end + len(self._index)
        header = Header(step, 0, end, "", 0, self._end).encode()
        piece[self._end : end] = self._index
        piece[:HEADER_BYTES] = header.ljust(HEADER_BYTES, b"\0")

    def find_kept_steps(self) -> list[int]:
        headers = []
        for path in self._paths:
            with map_kept(path) as piece:
                headers.append(Header.parse(piece[:HEADER_BYTES]))
        return [header.step for header in headers if header is not None]

    def restore_state(self, step: int) -> None:
        with map_kept(self._paths[step % 2]) as piece:
            header = Header.parse(piece[:HEADER_BYTES])
            assert header is not None and header.step == step
            self._state = piece[HEADER_BYTES : self._end]

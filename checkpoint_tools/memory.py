"""Samples the peak of the memory that several processes take together."""

import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

SAMPLE_EVERY_S = 0.1


class PeakMemory:
    """Samples the memory of processes while it is entered; `peak_bytes` is the largest sum.

    The memory of a process is its proportional set size (Pss in smaps_rollup): all its pages,
    including those of libraries, each divided by the number of processes that share it. So the sum
    counts no page twice. It leaves out the page cache, which the system reclaims when it needs
    memory.
    """

    def __init__(self, process_ids: Sequence[int]) -> None:
        self._process_ids = process_ids
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory", daemon=True)
        self.peak_bytes = 0

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            self.peak_bytes = max(
                self.peak_bytes, sum(map(measure_proportional, self._process_ids))
            )
            if self._stop.wait(SAMPLE_EVERY_S):
                return


def measure_proportional(process_id: int) -> int:
    """Return the proportional set size of a process, 0 if it has ended."""
    try:
        text = Path(f"/proc/{process_id}/smaps_rollup").read_text()
    except (OSError, ValueError):
        return 0
    return sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:"))

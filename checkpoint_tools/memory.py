"""How much memory processes take together while something runs, sampled."""

import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

EVERY_S = 0.1


class PeakMemory:
    """While it is entered, samples the memory of the processes; `peak_bytes` is the largest sum.

    Of each process it is the proportional set size (Pss of smaps_rollup): all its pages, libraries too, each
    divided by the number of processes that share it, so that the sum counts no page twice. The page cache,
    which the system takes back when it wants, is not among them.
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
            self.peak_bytes = max(self.peak_bytes, sum(map(proportional_bytes, self._process_ids)))
            if self._stop.wait(EVERY_S):
                return


def proportional_bytes(process_id: int) -> int:
    """0 for a process that has ended."""
    try:
        text = Path(f"/proc/{process_id}/smaps_rollup").read_text()
    except (OSError, ValueError):
        return 0
    return sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:"))

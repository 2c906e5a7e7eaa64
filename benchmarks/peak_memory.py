"""Watches the memory of this process, for benchmarks."""

import threading

import psutil


class PeakMemory:
    """The most memory that this process had in the block, looked at every 20 ms."""

    def __enter__(self) -> "PeakMemory":
        self.most_bytes = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ends.set()
        self._thread.join()

    def _watch(self) -> None:
        process = psutil.Process()
        while not self._ends.wait(0.02):
            self.most_bytes = max(self.most_bytes, process.memory_info().rss)

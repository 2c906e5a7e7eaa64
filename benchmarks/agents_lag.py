"""Measures how late an event loop is: what its own process adds to every latency seen in it."""

import asyncio
import time
from collections.abc import Sequence

STEP_S = 0.01


class Lag:
    """Asks an event loop to be woken every STEP_S, and notes by how much it is late."""

    def __init__(self) -> None:
        self._lags_s: list[float] = []
        self._task = asyncio.create_task(self._measure())

    def stop(self, name: str) -> dict[str, float]:
        """Return <name>_lag_p50_ms and <name>_lag_p99_ms."""
        self._task.cancel()
        return percentiles(self._lags_s, f"{name}_lag_")

    async def _measure(self) -> None:
        while True:
            began_s = time.perf_counter()
            await asyncio.sleep(STEP_S)
            self._lags_s.append(time.perf_counter() - began_s - STEP_S)


def percentiles(seconds: Sequence[float], prefix: str = "") -> dict[str, float]:
    """Return the median, the 99th percentile and the maximum, in milliseconds."""
    ordered = sorted(seconds) or [0.0]
    last = len(ordered) - 1
    places = {"p50": last // 2, "p99": last * 99 // 100, "max": last}
    return {f"{prefix}{name}_ms": 1000 * ordered[place] for name, place in places.items()}

"""Decides whether a gateway takes one more request, or tells the client to ask again later."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mcore_rl.agents.gateway.episode_chat import Overloaded
from mcore_rl.process.clock import now_s

_POLL_S = 0.02
FreeKv = Callable[[], float | None]
"""Returns the free share of the KV cache of the engine that has most; None: it is not known."""


@dataclass(frozen=True)
class AdmissionOptions:
    """Bounds of what a gateway takes on.

    max_requests    generations at once, those that wait for an engine included; 0: no bound
    min_free_kv     share of its KV cache that some engine must have free; 0: no bound
    wait_s          for which a request waits here for its turn, before it is refused
    retry_after_s   what refused clients are told to wait
    """

    max_requests: int = 0
    min_free_kv: float = 0.0
    wait_s: float = 0.0
    retry_after_s: float = 1.0

    def __post_init__(self) -> None:
        if self.max_requests < 0:
            raise ValueError(f"max_requests={self.max_requests}: must be 0 (no bound) or more")
        if not 0 <= self.min_free_kv < 1:
            raise ValueError(f"min_free_kv={self.min_free_kv}: must lie in [0, 1)")
        if self.wait_s < 0:
            raise ValueError(f"wait_s={self.wait_s}: must be 0 or more")
        if self.retry_after_s <= 0:
            raise ValueError(f"retry_after_s={self.retry_after_s}: must be greater than 0")


class Admission:
    """Counts the generations of a gateway, and refuses further ones beyond the bounds."""

    def __init__(self, options: AdmissionOptions, free_kv: FreeKv = lambda: None) -> None:
        self._options = options
        self._free_kv = free_kv
        self.num_running = 0

    def check(self) -> None:
        """Raise Overloaded if a new request is not to be taken now."""
        options = self._options
        if options.max_requests and self.num_running >= options.max_requests:
            raise Overloaded(options.retry_after_s)
        free = self._free_kv() if options.min_free_kv else None
        # Whatever the engines say, one request goes on: they may count what nobody uses any more.
        if free is not None and free < options.min_free_kv and self.num_running:
            raise Overloaded(options.retry_after_s)

    async def enter(self) -> None:
        """Wait until a new request may be taken; raise Overloaded if that takes too long.

        The caller must `begin` its generation before it awaits anything else.
        """
        until_s = now_s() + self._options.wait_s
        while True:
            try:
                return self.check()
            except Overloaded:
                if now_s() >= until_s:
                    raise
            await asyncio.sleep(_POLL_S)

    def begin(self, generation: "asyncio.Task[Any]") -> None:
        """Count a generation, from now until it is done."""
        self.num_running += 1
        generation.add_done_callback(self._end)

    def _end(self, generation: "asyncio.Task[Any]") -> None:
        self.num_running -= 1

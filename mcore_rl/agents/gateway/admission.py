"""Where a gateway listens, its bounds, and whether it takes one more request.

A request that is not taken tells its client to ask again later.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.agents.gateway.models import POLICY
from mcore_rl.agents.gateway.sessions import OverloadedError
from mcore_rl.process.clock import now_s
from mcore_rl.process.network import is_loopback

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
        """Raise OverloadedError if a new request is not to be taken now."""
        options = self._options
        if options.max_requests and self.num_running >= options.max_requests:
            raise OverloadedError(options.retry_after_s)
        free = self._free_kv() if options.min_free_kv else None
        # Whatever the engines say, one request goes on: they may count what nobody uses any more.
        if free is not None and free < options.min_free_kv and self.num_running:
            raise OverloadedError(options.retry_after_s)

    async def enter(self) -> None:
        """Wait until a new request may be taken; raise OverloadedError if that takes too long.

        The caller must `begin` its generation before it awaits anything else.
        """
        until_s = now_s() + self._options.wait_s
        while True:
            try:
                return self.check()
            except OverloadedError:
                if now_s() >= until_s:
                    raise
            await asyncio.sleep(_POLL_S)

    def begin(self, generation: "asyncio.Task[Any]") -> None:
        """Count a generation, from now until it is done."""
        self.num_running += 1
        generation.add_done_callback(self._end)

    def _end(self, generation: "asyncio.Task[Any]") -> None:
        self.num_running -= 1


@dataclass(frozen=True)
class GatewayOptions:
    """Options of a gateway.

    host             interface that it listens on
    port             0: a free one
    public_host      name by which programs reach it; empty: `host`
    model            name of the policy, which GET /v1/models shows
    adapters         names of what engines serve beside the policy; empty: requests may name any
                     model, and the policy answers
    max_body_bytes   of a request, decompressed
    body_s           a request's body must have arrived by then
    answer_s         an answer must be there by then; the generation goes on for a retry
    retry_window_s   a completion is kept so long for a retry of its request
    keep_alive_s     between signs of life on a stream while the policy generates
    admission        when further requests are refused with 429
    """

    host: str = "127.0.0.1"
    port: int = 0
    public_host: str = ""
    model: str = POLICY
    adapters: tuple[str, ...] = ()
    max_body_bytes: int = 16 << 20
    body_s: float = 60.0
    answer_s: float = 3600.0
    retry_window_s: float = 120.0
    keep_alive_s: float = 5.0
    admission: AdmissionOptions = field(default_factory=AdmissionOptions)

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "body_s", "answer_s", "retry_window_s", "keep_alive_s"):
            value = getattr(self, name)
            if value <= 0:
                raise ValueError(f"GatewayOptions.{name}={value}: must be positive")
        if self.host in ("0.0.0.0", "::") and not self.public_host:
            raise ValueError(
                f"GatewayOptions.host={self.host} is every interface, which is no address to"
                " reach the gateway at: set public_host as well"
            )

    @property
    def is_local(self) -> bool:
        return is_loopback(self.host)

"""The verbs of those who sample for the loop: all nodes' collectors."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from mcore_rl.rollout.drafts import DraftCounts
from mcore_rl.rollout.paces import Paces
from mcore_rl.rollout.request import Sampling
from mcore_rl.types import Prompt, StoredSample


class SamplingSession(Protocol):
    """Requests that share one bound; see rollout.collector_pool.PoolSession."""

    @property
    def num_open(self) -> int: ...

    @property
    def num_cut_off(self) -> int: ...

    @property
    def is_held(self) -> bool: ...

    async def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[StoredSample]:
        """Return the samples of each prompt in the order of `prompts`."""
        ...

    async def hold(self, *, cut_off: bool) -> None: ...

    async def resume(self) -> None: ...


class SamplingClient(Protocol):
    """See rollout.collector_pool.CollectorPool."""

    @property
    def max_in_flight(self) -> int: ...

    @property
    def num_lost(self) -> int:
        """Samples that were begun and lost with a collector before they were there."""
        ...

    @property
    def num_done(self) -> int:
        """Samples that are drawn so far, the lost ones included."""
        ...

    @property
    def num_tokens(self) -> int:
        """Response tokens of the groups that are drawn so far."""
        ...

    @property
    def num_losses(self) -> int:
        """How often a collector was lost with what it kept; `is_lost` changes with this alone."""
        ...

    def is_lost(self, sample: StoredSample) -> bool:
        """Return whether a sample is gone with the collector that kept it."""
        ...

    def take_paces(self) -> Paces:
        """Return the tokens and seconds of requests since the last call, of all engines."""
        ...

    def take_drafts(self) -> DraftCounts:
        """Return the verified drafts since the last call, by version of weights."""
        ...

    async def idle_seconds(self) -> float: ...

    async def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[StoredSample]: ...

    def open(
        self, max_in_flight: int = 0, on_done: Callable[[], None] = lambda: None
    ) -> AbstractAsyncContextManager[SamplingSession]:
        """Open a SamplingSession for the length of the block."""
        ...

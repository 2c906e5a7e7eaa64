"""The values of a simulated engine: how fast it is, and the requests that it serves."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from mcore_rl.types import VersionSpan, WeightVersion


@dataclass(frozen=True)
class EngineSpeed:
    """Seconds of an engine's work, and the room it has.

    fixed_s         seconds of a decode step apart from its context, by number of running requests
    per_context_s   seconds of a decode step for each token of context
    prefill_s       seconds to compute a prompt of so many tokens
    """

    fixed_s: Sequence[float]
    per_context_s: float
    prefill_s: Callable[[int], float]
    kv_capacity: int

    def slowed(self, times: float) -> "EngineSpeed":
        """Return the speed of an engine that takes so many times longer."""
        return replace(
            self,
            fixed_s=[seconds * times for seconds in self.fixed_s],
            per_context_s=self.per_context_s * times,
            prefill_s=lambda num_tokens: self.prefill_s(num_tokens) * times,
        )

    @property
    def max_running(self) -> int:
        return len(self.fixed_s) - 1


@dataclass(eq=False)
class EngineRequest:
    """A request; `began_at` is the engine's step counter when its first token would have begun."""

    prompt: int
    prompt_len: int
    response_len: int
    max_len: int
    done: "asyncio.Future[None]"
    began_at: float = 0.0
    num_generated: float = 0.0
    edges: list[tuple[int, WeightVersion]] = field(default_factory=list)
    number: int = 0
    """Key among the running requests; 0 while it waits."""

    def spans(self) -> tuple[VersionSpan, ...]:
        """Return the versions that sampled the response, each with its tokens."""
        starts = [start for start, _ in self.edges[1:]]
        stops = [*starts, self.response_len]
        return tuple(
            VersionSpan(start, stop, version)
            for (start, version), stop in zip(self.edges, stops, strict=True)
            if stop > start
        )

    def generated_at(self, steps: float) -> float:
        """Return the tokens that a running request has at the engine's step counter `steps`."""
        return steps - self.began_at

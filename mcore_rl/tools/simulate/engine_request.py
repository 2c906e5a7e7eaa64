"""The values of a simulated engine: how fast it is, and the requests that it serves."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from mcore_rl.types import VersionSpan, WeightVersion


@dataclass(frozen=True)
class EngineSpeed:
    """Seconds of an engine's work, and the room it has.

    fixed_s         seconds of a decode step apart from its context, by number of running requests
    per_context_s   seconds of a decode step for each token of context
    prefill_s       seconds to compute a prompt of so many tokens
    share_prompts   samples of a prompt wait until it is computed (rollout.share_prompts)
    """

    fixed_s: Sequence[float]
    per_context_s: float
    prefill_s: Callable[[int], float]
    kv_capacity: int
    share_prompts: bool = True

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

    def steps_in(self, seconds: float, num_running: int, context_len: float) -> float:
        """Return the decode steps in so many seconds of requests with so much context."""
        rate = self.fixed_s[num_running] + self.per_context_s * context_len
        growth = self.per_context_s * num_running
        if growth * seconds < 1e-9 * rate * rate:
            return seconds / rate
        return (math.sqrt(rate * rate + 2 * growth * seconds) - rate) / growth

    def seconds_of(self, steps: float, num_running: int, context_len: float) -> float:
        """Return the seconds of so many decode steps; see `steps_in`."""
        rate = self.fixed_s[num_running] + self.per_context_s * context_len
        return steps * rate + self.per_context_s * num_running * steps * steps / 2


class EndedEarlyError(Exception):
    """A request was ended alone; `versions` are those that drew its tokens until then."""

    def __init__(self, versions: tuple[VersionSpan, ...]) -> None:
        super().__init__("the engine aborted it: asked to")
        self.versions = versions


@dataclass(eq=False)
class EngineRequest:
    """A request; `began_at` is the engine's step counter when its first token would have begun."""

    prompt: int
    prompt_len: int
    response_len: int
    max_len: int
    done: "asyncio.Future[None]"
    rid: str = ""
    began_at: float = 0.0
    num_generated: float = 0.0
    edges: list[tuple[int, WeightVersion]] = field(default_factory=list)
    number: int = 0
    """Key among the running requests; 0 while it waits."""

    def spans(self, num_drawn: int) -> tuple[VersionSpan, ...]:
        """Return the versions that sampled the tokens up to `num_drawn`, each with its tokens."""
        if not self.edges:  # it never ran
            return ()
        starts = [start for start, _ in self.edges[1:]]
        stops = [*starts, num_drawn]
        return tuple(
            VersionSpan(start, stop, version)
            for (start, version), stop in zip(self.edges, stops, strict=True)
            if stop > start
        )

    def generated_at(self, steps: float) -> float:
        """Return the tokens that a running request has at the engine's step counter `steps`."""
        return steps - self.began_at

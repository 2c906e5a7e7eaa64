"""Counts the tokens of an engine's KV cache, and decides how many must stay free.

The rules are those of SGLang's scheduler (managers/schedule_policy.py, new_token_ratio_tracker.py)
and of rollout/scheduler_setup.py. EngineSpeed and EngineRequest describe a simulated engine.
"""

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from mcore_rl.rollout.scheduler_setup import LEAST_TOKENS
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

    def slow_down(self, times: float) -> "EngineSpeed":
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

    def count_generated(self, steps: float) -> float:
        """Return the tokens that a running request has at the engine's step counter `steps`."""
        return steps - self.began_at


CLIP_NEW_TOKENS = 4096
"""Most tokens that a request is expected to generate from now on."""
FIRST_RATIO, LEAST_RATIO, DECAY_STEPS = 0.7, 0.7 * 0.14, 600
"""Share of those for which running requests keep room; it falls with every decode step."""
STEPS_AFTER_RETRACT = 20
SHORT_PROMPT_LEN = LEAST_TOKENS
"""Samples of a longer prompt wait for the first of them, whose keys they share; those of a prompt
of so many tokens or less, which arrive together, compute them all."""
CACHED_PROMPTS = 4096
"""Prompts that stay cached after their requests."""


class KvCache:
    """Tokens of the running requests, each prompt once, and the prompts that are still cached."""

    def __init__(self, capacity: int, share_prompts: bool = True) -> None:
        """`share_prompts`: see EngineSpeed."""
        self._capacity = capacity
        self._share_prompts = share_prompts
        self._in_batch: set[int] = set()
        """Prompts of the requests that are let in together, which the cache does not have yet."""
        self._used = 0.0
        self._prompts: Counter[int] = Counter()
        """Running requests by prompt."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._ratio = FIRST_RATIO
        self._ratio_at = 0.0

    @property
    def free(self) -> float:
        """Tokens that are not used by running requests; below 0 where it is too full."""
        return self._capacity - self._used

    def free_share(self, waiting: Collection[EngineRequest], num_running: int) -> float:
        """Return what is free, 0 to 1, where waiting requests count as running ones do."""
        own = sum(request.prompt_len + request.num_generated for request in waiting)
        to_come = len(waiting) * self._used / max(num_running, 1)
        return max(0.0, 1.0 - (self._used + own + to_come) / self._capacity)

    def grow(self, num_tokens: float) -> None:
        self._used += num_tokens

    def begin_batch(self, running: Collection[EngineRequest], steps: float) -> float:
        """Begin to let in requests together; return the tokens that they may take, as `room` does.

        The cache has the prompts that were let in before.
        """
        self._in_batch.clear()
        return self.room(running, steps)

    def enter(self, request: EngineRequest) -> int:
        """Take in a request that begins to run; return the tokens whose keys are to be computed."""
        computed = request.num_generated
        if not self._has(request.prompt) or request.prompt_len <= SHORT_PROMPT_LEN:
            computed += request.prompt_len
            self._in_batch.add(request.prompt)
        self._cached[request.prompt] = None
        self._cached.move_to_end(request.prompt)
        if len(self._cached) > CACHED_PROMPTS:
            self._cached.popitem(last=False)
        if not self._prompts[request.prompt]:
            self._used += request.prompt_len
        self._prompts[request.prompt] += 1
        self._used += request.num_generated
        return round(computed)

    def _has(self, prompt: int) -> bool:
        """Return whether a request need not compute the keys of its prompt."""
        return prompt in self._cached and (self._share_prompts or prompt not in self._in_batch)

    def leave(self, request: EngineRequest) -> None:
        self._used -= request.num_generated
        self._prompts[request.prompt] -= 1
        if not self._prompts[request.prompt]:
            del self._prompts[request.prompt]
            self._used -= request.prompt_len

    def flush(self) -> None:
        """Forget cached prompts, as after a change of weights."""
        self._cached.clear()

    def room(self, running: Collection[EngineRequest], steps: float) -> float:
        """Return the tokens that new requests may take, at the engine's step counter `steps`."""
        expected = 0.0
        for request in running:  # the innermost loop of a simulation: no calls
            ahead = request.max_len - (steps - request.began_at)
            expected += ahead if ahead < CLIP_NEW_TOKENS else CLIP_NEW_TOKENS
        decayed = (FIRST_RATIO - LEAST_RATIO) / DECAY_STEPS * (steps - self._ratio_at)
        return self.free - max(self._ratio - decayed, LEAST_RATIO) * expected

    def count_needed(self, request: EngineRequest) -> float:
        """Return the tokens that must be free for a request to begin."""
        new_tokens = request.num_generated
        if not self._prompts[request.prompt]:
            new_tokens += request.prompt_len
        return new_tokens + min(request.max_len - request.num_generated, CLIP_NEW_TOKENS)

    def note_retraction(self, running: Collection[EngineRequest], steps: float) -> None:
        """Keep more free from now on, as requests were sent back; `running` are those that stay."""
        generated = sum(request.count_generated(steps) for request in running)
        most = sum(request.max_len for request in running)
        expected = generated + STEPS_AFTER_RETRACT * len(running)
        self._ratio = min(expected / (most + 1), 1.0)
        self._ratio_at = steps

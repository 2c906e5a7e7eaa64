"""Derives the deadlines of a run's waits, so that who waits outlasts what it waits for.

    a stopped engine is killed  <  a rank gives up its peers  <  the controller gives up the rank

So an error names the part that is at fault, and not those that waited for it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mcore_rl.config import RewardConfig, RolloutConfig, RunConfig, ServedModelConfig

ANSWER_MARGIN_S = 30.0
"""How much longer the controller waits for a rank than the rank for others."""
STOPPED_S = 30.0
"""How long a process may be stopped, for example by a debugger, before it counts as lost."""
BATCH_S = (20.0, 300.0)
"""Bounds of how long an engine may compute one batch: its first one may compile kernels."""


def answer_s(waits_s: float) -> float:
    """Return how long to wait for the answer of a process that may itself wait for `waits_s`."""
    return waits_s + ANSWER_MARGIN_S


def limit_stopped(*waits_s: float) -> float:
    """Return how long a process may be stopped, given what others wait for it."""
    return min(STOPPED_S, *(wait_s / 4 for wait_s in waits_s))


def limit_batch(request_s: float) -> float:
    """Return how long an engine may compute one batch, given the deadline of its requests.

    A stuck server is ended after 1.5 times as long and 10 s (workers/engine_worker.py). Requests of
    40 s or more are still waited for then, so the engine is replaced before it costs another one.
    """
    shortest, longest = BATCH_S
    return min(longest, max(shortest, 0.4 * request_s))


@dataclass(frozen=True)
class Deadlines:
    """Seconds that the parts of a run wait for one another.

    stopped    an engine whose processes are stopped, before it is killed
    peers      a rank for others: in collectives, in links and transfers of weights, for its save
    request    one request to an engine of the policy
    requests   a request with all its retries
    hold       a collector until its requests are held
    answer     the controller for a rank
    scored     a reward function, judge, reward model or teacher for one sample
    score      the controller for the scores of samples
    """

    stopped: float
    peers: float
    request: float
    requests: float
    hold: float
    answer: float
    scored: float
    score: float

    @staticmethod
    def from_options(
        run: RunConfig,
        rollout: RolloutConfig,
        reward: RewardConfig,
        served: Iterable[ServedModelConfig],
    ) -> "Deadlines":
        """`served` are the models beside the policy, used or not."""
        call_s = run.call_timeout_s
        request_s = rollout.request_timeout_s
        requests_s = request_s * (rollout.retries + 1)
        scored_s = max(reward.timeout_s, *(model.request_timeout_s for model in served))
        return Deadlines(
            stopped=limit_stopped(call_s, request_s),
            peers=call_s,
            request=request_s,
            requests=requests_s,
            hold=requests_s + call_s,
            answer=answer_s(call_s),
            scored=scored_s,
            score=scored_s + call_s,
        )

    @property
    def pairs(self) -> dict[str, tuple[float, float]]:
        """By name, (deadline of who waits, deadline of what it waits for)."""
        return {
            "answer > peers": (self.answer, self.peers),
            "peers > stopped": (self.peers, self.stopped),
            "request > stopped": (self.request, self.stopped),
            "requests >= request": (self.requests * (1 + 1e-9), self.request),
            "hold > requests": (self.hold, self.requests),
            "score > scored": (self.score, self.scored),
        }

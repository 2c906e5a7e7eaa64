"""Finds the fullest moment of each GPU that several processes share, and what they hold then."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mcore_rl.config import ParallelConfig

Side = Literal["trainer", "critic", "engine"]
"""The side whose layout decides; ranks on shared GPUs count as the trainer's."""
Uses = dict[str, float]
"""Purpose -> bytes."""


@dataclass(frozen=True)
class RankMemory:
    """The ranks `who` at their fullest moment.

    uses            bytes per purpose, without what the processes themselves take
    num_processes   processes on each of their GPUs
    """

    side: Side
    who: str
    moment: str
    uses: Mapping[str, float]
    num_processes: int = 1

    @property
    def num_bytes(self) -> float:
        return sum(self.uses.values())

    @property
    def largest(self) -> str:
        return max(self.uses, key=lambda what: self.uses[what])


def name_stage(role: str, stage: int, num_stages: int, parallel: ParallelConfig) -> str:
    """The plan's name for the ranks of a pipeline stage."""
    per_stage = parallel.world_size // num_stages
    return f"{role} ranks {stage * per_stage}-{(stage + 1) * per_stage - 1}"


def encode_ranks(ranks: Iterable[RankMemory]) -> list[dict[str, Any]]:
    return [
        {
            "who": rank.who,
            "moment": rank.moment,
            "bytes": round(rank.num_bytes),
            "uses": {what: round(size) for what, size in rank.uses.items()},
        }
        for rank in ranks
    ]


UNROUNDED = "weights before rounding"
"""The copy of the matrices that train.fake_quantization rounds."""
SENT_EXPERTS = "experts in INT4"
"""Words and scales of rollout.quantization=int4, which a trainer rank has while it sends them."""
STATE = ("weights", "gradients", "optimizer")
KEPT = ("sync buffers", "sync communicators", "CUDA graphs")
"""Purposes of memory that a process keeps as long as it runs."""
RELEASED = ("KV cache", "linear attention")
"""Purposes of memory that an engine has given up while it gets weights (memory_pool.py of SGLang,
the regions of its memory saver)."""


def find_peaks(
    parallel: ParallelConfig,
    offload: bool,
    trainer: list[Uses],
    critic: list[Uses],
    engines: list[Uses],
    colocated: Uses,
    *,
    sends_rounded: bool = False,
) -> Iterable[RankMemory]:
    """The GPUs of each trainer stage at their fullest moment.

    A GPU may also host a rank of the critic and of an engine. Which of those meet is left open: the
    fullest critic stage and the fullest engine stage are assumed.

    offload         trainer and critic release their state while others use the GPU
    trainer         bytes per purpose of each pipeline stage; critic and engines likewise, if they
                    share
    colocated       role of a served model -> bytes of its weights
    sends_rounded   engines get weights as train.fake_quantization rounds them

    Evaluation holds what generation does. Checkpoints and exports are written from host memory, so
    they hold no more. Passes for log-probs, and the one that checks a weight sync before it begins,
    hold less than a train step.
    """
    colocated_critic = max(critic, key=lambda uses: sum(uses.values()), default={})
    colocated_engine = max(engines, key=lambda uses: sum(uses.values()), default={})
    num_processes = 1 + bool(critic) + bool(engines) + len(colocated)
    for stage, uses in enumerate(trainer):
        moments = _list_moments(offload, uses, colocated_critic, colocated_engine, colocated)
        if sends_rounded:
            moments["weight sync"] |= _select(moments["train step"], "trainer's", (UNROUNDED,))
        moment = max(moments, key=lambda name: sum(moments[name].values()))
        who = name_stage("trainer", stage, len(trainer), parallel)
        yield RankMemory("trainer", who, moment, moments[moment], num_processes)


def _list_moments(
    offload: bool, trainer: Uses, critic: Uses, engine: Uses, colocated: Uses
) -> dict[str, Uses]:
    """Return by moment what the processes on one GPU hold; see `find_peaks`."""
    sent = trainer.get(SENT_EXPERTS, 0)
    own = {f"trainer's {what}": size for what, size in trainer.items() if what != SENT_EXPERTS}
    other = {f"critic's {what}": size for what, size in critic.items()}
    served = {f"engine's {what}": size for what, size in engine.items()}
    state = () if offload else STATE
    own_idle = _select(own, "trainer's", (*state, *KEPT))
    other_idle = _select(other, "critic's", state)
    engine_idle = _select(served, "engine's", KEPT)
    idle = {**own_idle, **other_idle}
    return {
        "train step": {**own, **other_idle, **engine_idle},
        "critic's train step": {**other, **own_idle, **engine_idle} if other else {},
        "weight sync": {
            **idle,
            **_select(own, "trainer's", ("weights",)),
            **({f"trainer's {SENT_EXPERTS}": sent} if sent else {}),
            **_drop(served, "engine's", RELEASED),
        },
        "generation": {**idle, **served},
        "scoring": {
            **idle,
            **_select(served, "engine's", ("weights",)),
            **engine_idle,
            **{f"{role}'s weights": size for role, size in colocated.items()},
        },
    }


def _select(uses: Uses, owner: str, names: Iterable[str]) -> Uses:
    wanted = {f"{owner} {name}" for name in names}
    return {what: size for what, size in uses.items() if what in wanted}


def _drop(uses: Uses, owner: str, names: Iterable[str]) -> Uses:
    unwanted = {f"{owner} {name}" for name in names}
    return {what: size for what, size in uses.items() if what not in unwanted}

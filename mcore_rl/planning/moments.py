"""Finds the fullest moment of each GPU that several processes share.

Reads the facts about a recipe's policy and critic, each model directory once.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mcore_rl.algo.lookup import needs_of
from mcore_rl.config import Config, ParallelConfig
from mcore_rl.planning.rank_memory import RankMemory, Uses, stage_name
from mcore_rl.weights.hf.facts import ModelFacts


@dataclass(frozen=True)
class RecipeModels:
    """The models that a recipe trains, as their directories describe them.

    critic   None without a critic; a critic that starts from the policy shares the policy's facts
    """

    policy: ModelFacts
    critic: ModelFacts | None


def read_models(config: Config) -> RecipeModels:
    """Raises ValueError naming the option and the file if a model is missing or not supported."""
    policy = read_policy(config.model.path)
    return RecipeModels(
        policy,
        read_critic(config.critic.path, policy) if needs_of(config.algorithm).critic else None,
    )


def read_policy(path: str) -> ModelFacts:
    """`path`: model.path. Raises ValueError naming it if the model is missing or not supported."""
    try:
        return ModelFacts.read(path)
    except ValueError as error:
        raise ValueError(f"model.path={path}: {error}") from None


def read_critic(path: str, policy: ModelFacts) -> ModelFacts:
    """Return the model that the critic starts from: `path` (critic.path), or the policy if empty.

    Raises ValueError naming critic.path if the model is missing or not supported.
    """
    if not path:
        return policy
    try:
        return ModelFacts.read(path)
    except ValueError as error:
        raise ValueError(f"critic.path={path}: {error}") from None


STATE = ("weights", "gradients", "optimizer")


def shared_gpus(
    parallel: ParallelConfig,
    offload: bool,
    trainer: list[Uses],
    critic: list[Uses],
    engines: list[Uses],
    colocated: Uses,
) -> Iterable[RankMemory]:
    """The GPUs of each trainer stage at their fullest moment.

    A GPU may also host a rank of the critic and of an engine. Which of those meet is left open: the
    fullest critic stage and the fullest engine stage are assumed.

    offload     trainer and critic release their state while others use the GPU
    trainer     bytes per purpose of each pipeline stage; critic and engines likewise, if they share
    colocated   role of a served model -> bytes of its weights

    Evaluation holds what generation does. Checkpoints and exports are written from host memory, so
    they hold no more. Passes for log-probs, and the one that checks a weight sync before it begins,
    hold less than a train step.
    """
    colocated_critic = max(critic, key=lambda uses: sum(uses.values()), default={})
    colocated_engine = max(engines, key=lambda uses: sum(uses.values()), default={})
    num_processes = 1 + bool(critic) + bool(engines) + len(colocated)
    for stage, uses in enumerate(trainer):
        moments = _moments(offload, uses, colocated_critic, colocated_engine, colocated)
        moment = max(moments, key=lambda name: sum(moments[name].values()))
        who = stage_name("trainer", stage, len(trainer), parallel)
        yield RankMemory("trainer", who, moment, moments[moment], num_processes)


def _moments(
    offload: bool, trainer: Uses, critic: Uses, engine: Uses, colocated: Uses
) -> dict[str, Uses]:
    """Return by moment what the processes on one GPU hold; see `shared_gpus`."""
    own = {f"trainer's {what}": size for what, size in trainer.items()}
    other = {f"critic's {what}": size for what, size in critic.items()}
    served = {f"engine's {what}": size for what, size in engine.items()}
    own_idle = {} if offload else _only(own, "trainer's", STATE)
    other_idle = {} if offload else _only(other, "critic's", STATE)
    idle = {**own_idle, **other_idle}
    return {
        "train step": {**own, **other_idle},
        "critic's train step": {**other, **own_idle} if other else {},
        "weight sync": {
            **idle,
            **_only(own, "trainer's", ("weights", "sync buffers")),
            **_without(served, "engine's KV cache"),
        },
        "generation": {**idle, **served},
        "scoring": {
            **idle,
            **_only(served, "engine's", ("weights",)),
            **{f"{role}'s weights": size for role, size in colocated.items()},
        },
    }


def _only(uses: Uses, owner: str, names: Iterable[str]) -> Uses:
    wanted = {f"{owner} {name}" for name in names}
    return {what: size for what, size in uses.items() if what in wanted}


def _without(uses: Uses, name: str) -> Uses:
    return {what: size for what, size in uses.items() if what != name}

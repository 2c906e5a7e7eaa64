"""Predicts all that the simulation of a recipe needs to know of time, before it begins."""

from dataclasses import dataclass

from mcore_rl.config import Config
from mcore_rl.planning.deployment import make_deployment
from mcore_rl.planning.memory import critic_uses, trainer_uses
from mcore_rl.planning.models import RecipeModels
from mcore_rl.planning.sync import predict_sync
from mcore_rl.tools.simulate.costs import ModelState, TrainCosts, engine_speed, read_back_s, swap_s
from mcore_rl.tools.simulate.engine_request import EngineSpeed
from mcore_rl.tools.simulate.hardware import GPUS, ReachedShares
from mcore_rl.tools.simulate.tower_costs import TowerCosts
from mcore_rl.weights.hf.facts import ModelFacts
from mcore_rl.weights.hf.flops import ModelFlops
from mcore_rl.weights.models.value_head import with_value_head

CANARY_S = 0.5


@dataclass(frozen=True)
class RecipeCosts:
    """Predicted seconds and sizes of a recipe, made once.

    canary_s   seconds in which the trainer, and then the engines, score a few sequences
    other_s    seconds of a step for what is not simulated
    of_idle    whether the seconds of sync and canary are those of idle engines, as a run in
               rollout.mode=sync has them; engines that sample meanwhile finish a step before
    read_back_s   by which the swap takes longer in a sync that is read back
    """

    engine: EngineSpeed
    trainer: TrainCosts
    critic: TrainCosts | None
    sync_s: float
    swap_s: float
    sync_bytes: int
    canary_s: float = CANARY_S
    other_s: float = 0.0
    of_idle: bool = False
    read_back_s: float = 0.0

    @staticmethod
    def of(config: Config, models: RecipeModels, shares: ReachedShares) -> "RecipeCosts":
        """Raises ValueError naming two sizes that do not divide."""
        gpu = GPUS[config.simulate.gpu]
        policy = models.policy
        plan, _ = predict_sync(config, make_deployment(config, policy))
        state = ModelState.of(trainer_uses(config, models))
        flops = ModelFlops.of(policy)
        tower = TowerCosts.of(config, policy, gpu, shares)
        trainer = TrainCosts(
            config, policy, flops, config.parallel, gpu, shares, state, tower=tower
        )
        critic = None
        if models.critic is not None:
            state = ModelState.of(critic_uses(config, models))
            parallel = config.critic.parallel
            facts = ModelFacts(models.critic.path, with_value_head(models.critic.config))
            flops = ModelFlops.of(facts)
            tower = TowerCosts.of(config, facts, gpu, shares)
            critic = TrainCosts(config, facts, flops, parallel, gpu, shares, state, tower=tower)
        return RecipeCosts(
            engine_speed(config, policy, gpu, shares),
            trainer,
            critic,
            plan.seconds / shares.network,
            swap_s(config, policy, gpu, shares),
            plan.model_bytes,
            read_back_s=read_back_s(config, policy, gpu, shares),
        )

"""Makes a recipe of NeMo-RL's options (0.7): configurations of GRPO and of PPO."""

from mcore_rl.tools.translate.foreign import ForeignOptions, Found
from mcore_rl.tools.translate.nemo_algorithm import (
    translate_advantage,
    translate_critic,
    translate_loss,
)
from mcore_rl.tools.translate.nemo_generation import translate_engines, translate_sampling
from mcore_rl.tools.translate.nemo_optimizer import translate_optimizer
from mcore_rl.tools.translate.nemo_policy import (
    is_ppo,
    translate_batches,
    translate_layout,
    translate_micro_batches,
    translate_model,
    translate_training,
)
from mcore_rl.tools.translate.nemo_run import translate_data, translate_reward, translate_run
from mcore_rl.tools.translate.nemo_unneeded import reason_of
from mcore_rl.tools.translate.translation import Translation, account

OTHER_LOOPS = {
    "sft": "`mcore-rl sft` with sft.* (docs/recipes.md)",
    "dpo": "`mcore-rl dpo` with dpo.* (docs/algorithms.md)",
    "rm": "reward models are served, not trained (docs/rewards.md)",
    "distillation": "algorithm.advantage=distillation with teacher.path (docs/algorithms.md)",
    "eval": "`mcore-rl eval` with eval.*",
}
"""Groups of options of other training loops, and what there is instead."""


def translate_nemo_rl(options: ForeignOptions) -> Translation:
    """Return the options of a recipe that does what NeMo-RL does with `options`.

    Raises ValueError naming the training loop if it is neither that of GRPO nor of PPO.
    """
    for loop, instead in OTHER_LOOPS.items():
        if any(name.startswith(f"{loop}.") for name in options.given):
            raise ValueError(
                f"the options have a group `{loop}`: configurations with `grpo` and with `ppo` are"
                f" translated; see {instead}"
            )
    return account(options, _found(options), reason_of)


def _found(options: ForeignOptions) -> Found:
    yield from translate_run(options)
    yield from translate_model(options)
    yield from translate_layout(options, "policy", "parallel")
    yield from translate_batches(options, "policy", "train")
    yield from translate_micro_batches(options)
    yield from translate_optimizer(options, "policy", "train.optimizer")
    yield from translate_data(options)
    yield from translate_engines(options)
    yield from translate_sampling(options)
    yield from translate_advantage(options)
    yield from translate_loss(options)
    yield from translate_reward(options)
    yield from translate_training(options)
    if is_ppo(options):
        yield from translate_critic(options)
        yield from translate_layout(options, "value", "critic.parallel")
        yield from translate_batches(options, "value", "critic")
        yield from translate_optimizer(options, "value", "critic.optimizer")

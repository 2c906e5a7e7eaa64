"""Makes a recipe of verl's options (0.7: ppo_trainer.yaml and ppo_megatron_trainer.yaml)."""

from mcore_rl.tools.translate.foreign import ForeignOptions, Found
from mcore_rl.tools.translate.translation import Translation, account
from mcore_rl.tools.translate.verl_algorithm import (
    translate_advantage,
    translate_correction,
    translate_critic,
    translate_kl,
    translate_loss,
)
from mcore_rl.tools.translate.verl_rollout import (
    translate_engines,
    translate_sampling,
    translate_turns,
)
from mcore_rl.tools.translate.verl_run import translate_data, translate_reward, translate_run
from mcore_rl.tools.translate.verl_training import (
    ACTOR,
    translate_layout,
    translate_model,
    translate_optimizer,
    translate_step,
)
from mcore_rl.tools.translate.verl_unneeded import reason_of


def translate_verl(options: ForeignOptions) -> Translation:
    """Return the options of a recipe that does what verl does with `options`."""
    return account(options, _found(options), reason_of)


def _found(options: ForeignOptions) -> Found:
    yield from translate_run(options)
    yield from translate_model(options)
    yield from translate_layout(options)
    yield from translate_step(options)
    yield from translate_optimizer(options, f"{ACTOR}.optim", "train.optimizer", 1e-6)
    yield from translate_data(options)
    yield from translate_engines(options)
    yield from translate_sampling(options)
    yield from translate_turns(options)
    yield from translate_advantage(options)
    yield from translate_loss(options)
    yield from translate_kl(options)
    yield from translate_correction(options)
    yield from translate_critic(options)
    yield from translate_reward(options)

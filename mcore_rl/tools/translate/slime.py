"""Makes a recipe of slime's options (0.3.1): its own, Megatron's and SGLang's."""

from mcore_rl.tools.translate.foreign import ForeignOptions, Found
from mcore_rl.tools.translate.megatron_flags import translate_flags
from mcore_rl.tools.translate.slime_layout import (
    translate_engines,
    translate_layout,
    translate_model,
)
from mcore_rl.tools.translate.slime_run import (
    translate_data,
    translate_reward,
    translate_run,
    translate_sampling,
)
from mcore_rl.tools.translate.slime_training import (
    translate_algorithm,
    translate_critic,
    translate_optimizer,
    translate_step,
)
from mcore_rl.tools.translate.slime_unneeded import reason_of
from mcore_rl.tools.translate.translation import Translation, account


def translate_slime(options: ForeignOptions) -> Translation:
    """Return the options of a recipe that does what slime does with `options`."""
    return account(options, _found(options), reason_of)


def _found(options: ForeignOptions) -> Found:
    yield from translate_run(options)
    yield from translate_model(options)
    yield from translate_layout(options)
    yield from translate_step(options)
    yield from translate_optimizer(options)
    yield from translate_data(options)
    yield from translate_engines(options)
    yield from translate_sampling(options)
    yield from translate_algorithm(options)
    yield from translate_critic(options)
    yield from translate_reward(options)
    yield from translate_flags(options, reason_of)

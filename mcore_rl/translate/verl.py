"""Makes a recipe of verl's options (0.7: ppo_trainer.yaml and ppo_megatron_trainer.yaml)."""

from dataclasses import dataclass

from omegaconf import OmegaConf

from mcore_rl.config import Config
from mcore_rl.config.recipe import make_config
from mcore_rl.translate.foreign import Decision, ForeignOptions, RecipeLine, Unneeded
from mcore_rl.translate.verl_algorithm import (
    translate_advantage,
    translate_correction,
    translate_critic,
    translate_kl,
    translate_loss,
)
from mcore_rl.translate.verl_rollout import (
    translate_engines,
    translate_sampling,
    translate_turns,
)
from mcore_rl.translate.verl_run import translate_data, translate_reward, translate_run
from mcore_rl.translate.verl_training import (
    ACTOR,
    Found,
    translate_layout,
    translate_model,
    translate_optimizer,
    translate_step,
)
from mcore_rl.translate.verl_unneeded import reason_of


@dataclass(frozen=True)
class Translation:
    """The end of the other system's options: each is in one of three lists.

    lines       options of the recipe
    decisions   options that are left to the user
    unneeded    options that a recipe does without
    """

    lines: tuple[RecipeLine, ...]
    decisions: tuple[Decision, ...]
    unneeded: tuple[Unneeded, ...]


def translate_verl(options: ForeignOptions) -> Translation:
    """Return the options of a recipe that does what verl does with `options`.

    Every option that was given is in the result: in a line, as a decision, or as unneeded.
    """
    found = list(_found(options))
    decisions = [item for item in found if isinstance(item, Decision)]
    lines = []
    for line in (item for item in found if isinstance(item, RecipeLine)):
        refusal = _refusal(line)
        if refusal is None:
            lines.append(line)
        else:
            decisions.append(Decision(", ".join(line.sources), line.value, refusal))
    unneeded = []
    for name, value in options.left().items():
        reason = reason_of(name)
        if reason is None:
            decisions.append(Decision(name, value, "this has no counterpart"))
        else:
            unneeded.append(Unneeded(name, value, reason))
    return Translation(tuple(lines), tuple(decisions), tuple(unneeded))


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


def _refusal(line: RecipeLine) -> str | None:
    """Return why an option of Megatron or SGLang is refused, or None."""
    if not {"megatron", "ddp", "sglang"} & set(line.key.split(".")[:-1]):
        return None
    tree = OmegaConf.structured(Config)
    OmegaConf.set_struct(tree, False)
    OmegaConf.update(tree, line.key, line.value, force_add=True)
    try:
        make_config(tree)
    except ValueError as error:
        return str(error)
    return None

"""Options of verl that several of its translations read, and what follows from them."""

import math
import os
from typing import Any

from mcore_rl.tools.translate.translation import ForeignOptions

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
SHARED = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "algorithm.adv_estimator": "gae",
    "actor_rollout_ref.hybrid_engine": True,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
}
"""Options that several rules read, and verl's defaults of them."""
FULLY_ASYNC = "async_training."
"""How the options of verl's fully asynchronous program begin."""


def take_shared(options: ForeignOptions, name: str) -> Any:
    """Return one of the options SHARED."""
    return options.take(name, SHARED[name])


def is_megatron(options: ForeignOptions) -> bool:
    """Return whether Megatron trains, and not FSDP."""
    own = "megatron" in options.config_name
    own |= options.take("model_engine", options.take("engine", "dp")) == "megatron"
    own |= any(name.startswith(f"{ACTOR}.megatron.") for name in options.given)
    return options.take(f"{ACTOR}.strategy", "megatron" if own else "fsdp") == "megatron"


def is_fully_async(options: ForeignOptions) -> bool:
    """Return whether verl's fully asynchronous program takes the options."""
    own = any(name.startswith(FULLY_ASYNC) for name in options.given)
    return own or options.config_name.startswith("fully_async")


def is_one_step_off(options: ForeignOptions) -> bool:
    """Return whether verl's program takes the options that samples one step ahead."""
    return options.config_name.startswith("one_step_off")


def is_colocated(options: ForeignOptions) -> bool:
    """Return whether engines run on the trainer's GPUs."""
    ahead = is_fully_async(options) or is_one_step_off(options)
    apart = options.take(f"{ROLLOUT}.nnodes", 0)
    return take_shared(options, "actor_rollout_ref.hybrid_engine") and not ahead and not apart


def take_prompts(options: ForeignOptions) -> tuple[int, tuple[str, ...]]:
    """Return the prompts of a step, from one weight sync to the next, and the options that say so.

    The fully asynchronous program takes some mini-batches at once, several times between two syncs.
    """
    if not is_fully_async(options):
        name = "data.train_batch_size"
        return take_shared(options, name), (name,)
    factors = {
        f"{ACTOR}.ppo_mini_batch_size": 256,
        f"{FULLY_ASYNC}require_batches": 1,
        f"{FULLY_ASYNC}trigger_parameter_sync_step": 4,
    }
    prompts = math.prod(options.take(name, default) for name, default in factors.items())
    return prompts, tuple(factors)


def home_of(path: str) -> str:
    """Return a path with the user's folder in place of a tilde at its beginning."""
    return os.path.expanduser(path)

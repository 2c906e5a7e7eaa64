"""Sizes of a recipe that must fit one another and the model; errors name both numbers and a remedy."""

from mcore_rl.algo.choice import needs_of
from mcore_rl.config import Config
from mcore_rl.planning.deployment import engine_sizes
from mcore_rl.slices.hf.facts import ModelFacts
from mcore_rl.slices.layouts.check import check_layout
from mcore_rl.slices.layouts.sglang_models import refuse_unserved


def check_sizes(config: Config, policy: ModelFacts) -> None:
    """ValueError where a layout does not divide the model, or a sequence does not fit where it has to be."""
    check_layout(policy.config, config.parallel)
    if needs_of(config.algorithm).critic:
        check_layout(policy.config, config.critic.parallel, "critic.parallel")
    check_lens(config, policy)


def check_engines(config: Config, policy: ModelFacts) -> None:
    """ValueError names what engines of the recipe's sizes cannot do with the model, or would do wrongly."""
    if config.rollout.quantization != "none" and policy.stacks_experts:
        raise ValueError(
            f"rollout.quantization={config.rollout.quantization} with model.path={config.model.path}, whose"
            " experts are stacked in one tensor: only none is supported"
        )
    if config.rollout.pp > 1 and config.drift.routed_experts and policy.has_experts:
        raise ValueError(
            f"rollout.pp={config.rollout.pp} with drift.routed_experts=true: an engine of several pipeline"
            " stages tells which experts the first stage chose, and no others; set drift.routed_experts=false"
        )
    try:
        refuse_unserved(policy.config, engine_sizes(config), config.model.dtype)
    except ValueError as error:
        raise ValueError(
            f"model.path={config.model.path} in the recipe's engines: {error}"
        ) from None


def check_lens(config: Config, policy: ModelFacts) -> None:
    longest = config.data.max_prompt_len + config.rollout.max_response_len
    for name, limit, remedy in (
        (
            "train.max_tokens_per_microbatch",
            config.train.max_tokens_per_microbatch,
            "raise the latter",
        ),
        ("rollout.kv_cache_len", config.rollout.kv_cache_len, "raise the latter"),
        (
            "max_position_embeddings",
            policy.max_position_embeddings,
            "lower one of the former",
        ),
    ):
        if longest > limit:
            of = " of config.json" if "." not in name else ""
            lens = f"data.max_prompt_len + rollout.max_response_len = {longest}"
            raise ValueError(f"{lens} exceeds {name}={limit}{of}: {remedy}")

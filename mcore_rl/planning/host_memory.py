"""Predicts the host memory of the nodes with engines: samples in stores, images, servers."""

from mcore_rl.algo.lookup import needs_of
from mcore_rl.config import Config, SandboxConfig, SearchConfig
from mcore_rl.weights.hf.facts import ModelFacts

_NUMBER = 4
"""Bytes of a token id, a log-prob, a value, an advantage."""
GIB = 2**30


def count_groups(config: Config) -> int:
    """Return the most groups that the stores hold at once.

    A step's groups stay until it is trained on, and those of the steps ahead that staleness allows
    are sampled meanwhile. Dynamic sampling has a round of others beside them.
    """
    rollout = config.rollout
    groups = (rollout.staleness_bound + 1) * rollout.prompts_per_step
    if rollout.dynamic_sampling:
        groups += round(rollout.oversampling * rollout.prompts_per_step)
    return groups


def count_token_bytes(config: Config, policy: ModelFacts) -> int:
    """Return the bytes of a token in a store, with all that is written beside it in a step."""
    needs = needs_of(config.algorithm)
    num_steps = config.train.epochs * config.train.mini_batches
    logprobs = 1  # the engine's
    logprobs += num_steps > 1 or needs.old_logprobs
    logprobs += needs.reference
    logprobs += needs.teacher
    others = 1 + 3 * needs.critic  # token ids; values, returns, advantages
    experts = 0
    if policy.has_experts and config.drift.routed_experts:
        size = 1 if policy.num_experts <= 256 else 2
        experts = sum(policy.moe_layers) * policy.experts_per_token * size
    logprob_bytes = 2 if config.rollout.logprob_dtype == "bfloat16" else _NUMBER
    return logprobs * logprob_bytes + others * _NUMBER + experts


def count_store_bytes(config: Config, policy: ModelFacts) -> float:
    """Return the most bytes in all stores together, if all sequences were as long as may be."""
    rollout = config.rollout
    longest = config.data.max_prompt_len + rollout.max_response_len
    num_tokens = count_groups(config) * rollout.samples_per_prompt * longest
    return num_tokens * count_token_bytes(config, policy)


def count_store_nodes(config: Config) -> int:
    """Return the nodes that have a store: one for each node that begins an engine."""
    rollout = config.rollout
    per_node = max(1, config.plan.ranks_per_host // rollout.engine_ranks)
    return -(-rollout.engines // per_node)


def explain_stores(config: Config, policy: ModelFacts) -> str:
    """Return a sentence with the stores' memory, and a second one if that is bounded."""
    whole, nodes = count_store_bytes(config, policy) / GIB, count_store_nodes(config)
    limit = config.rollout.store_gib
    beyond = ""
    if 0 < limit < whole / nodes:
        beyond = f" Beyond rollout.store_gib={limit:g} they go to files."
    longest = config.data.max_prompt_len + config.rollout.max_response_len
    return (
        f"Samples in host memory: at most {whole / nodes:.1f} GiB on each of {nodes}"
        f" node{'s' * (nodes > 1)} with engines ({count_groups(config):,} groups of"
        f" {config.rollout.samples_per_prompt}, {longest:,} tokens each,"
        f" {count_token_bytes(config, policy):,} bytes a token).{beyond}"
        + _explain_images(config, policy)
    )


def _explain_images(config: Config, policy: ModelFacts) -> str:
    if not policy.family.has_tower:
        return ""
    return (
        f" Patches of images: at most data.images.cache_gib={config.data.images.cache_gib:g} GiB of"
        " shared memory on each, beside the encoded images of their prompts."
    )


def explain_servers(sandbox: SandboxConfig, search: SearchConfig) -> str:
    """Return the servers and what they take besides the ranks' processors; empty: there is none."""
    parts = []
    if sandbox.is_used:
        parts.append(
            f"a sandbox of {sandbox.workers} programs at a time, {sandbox.memory_mib:,} MiB each"
            f" unless they ask for up to {sandbox.max_memory_mib:,}"
        )
    if search.is_used:
        parts.append(f"a search of {search.index} ({search.method}, {search.threads} threads)")
    if not parts:
        return ""
    return f"Servers, on each node with engines: {'; '.join(parts)}."

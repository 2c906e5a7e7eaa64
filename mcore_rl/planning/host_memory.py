"""Predicts the host memory of the nodes with engines: samples in stores, images, servers."""

from dataclasses import dataclass

from mcore_rl.algo.lookup import needs_of
from mcore_rl.algo.registry import Needs
from mcore_rl.config import (
    AlgorithmConfig,
    DataConfig,
    DriftConfig,
    PlanConfig,
    RolloutConfig,
    SandboxConfig,
    SearchConfig,
)
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.weights.hf.config import ModelFacts

_NUMBER = 4
"""Bytes of a token id, a log-prob, a value, an advantage."""
GIB = 2**30


@dataclass(frozen=True)
class StoreMemory:
    """The most that all stores together hold: all sequences are as long as may be.

    num_groups    groups of `group_size` sequences that the stores hold at once
    token_bytes   bytes of a token, with all that is written beside it in a step
    num_nodes     nodes that have a store
    limit_gib     rollout.store_gib
    cache_gib     data.images.cache_gib of a model that sees images, otherwise None
    """

    num_groups: int
    group_size: int
    max_len: int
    token_bytes: int
    num_nodes: int
    limit_gib: float
    cache_gib: float | None

    @staticmethod
    def make(
        run: PlannedRun, data: DataConfig, algorithm: AlgorithmConfig, drift: DriftConfig
    ) -> "StoreMemory":
        rollout = run.rollout
        policy = run.models.policy
        num_steps = run.train.epochs * run.train.mini_batches
        choices = count_expert_bytes(policy) if drift.routed_experts else 0
        max_len = data.max_prompt_len + rollout.max_response_len
        if drift.indexer_topk:
            choices += count_indexer_bytes(policy, max_len)
        logprob_bytes = 2 if rollout.logprob_dtype == "bfloat16" else _NUMBER
        return StoreMemory(
            num_groups=count_groups(rollout),
            group_size=rollout.samples_per_prompt,
            max_len=max_len,
            token_bytes=count_token_bytes(needs_of(algorithm), num_steps, logprob_bytes) + choices,
            num_nodes=count_store_nodes(rollout, run.plan),
            limit_gib=rollout.store_gib,
            cache_gib=data.images.cache_gib if policy.family.has_tower else None,
        )

    @property
    def num_bytes(self) -> int:
        return self.num_groups * self.group_size * self.max_len * self.token_bytes

    def explain(self) -> str:
        """Return a sentence with the stores' memory, and further ones about what bounds it."""
        node_gib = self.num_bytes / GIB / self.num_nodes
        beyond = images = ""
        if 0 < self.limit_gib < node_gib:
            beyond = f" Beyond rollout.store_gib={self.limit_gib:g} they go to files."
        if self.cache_gib is not None:
            images = (
                f" Patches of images: at most data.images.cache_gib={self.cache_gib:g} GiB of"
                " shared memory on each, beside the encoded images of their prompts."
            )
        return (
            f"Samples in host memory: at most {node_gib:.1f} GiB on each of {self.num_nodes}"
            f" node{'s' * (self.num_nodes > 1)} with engines ({self.num_groups:,} groups of"
            f" {self.group_size}, {self.max_len:,} tokens each,"
            f" {self.token_bytes:,} bytes a token).{beyond}{images}"
        )


def count_groups(rollout: RolloutConfig) -> int:
    """Return the most groups that the stores hold at once.

    A step's groups stay until it is trained on, and those of the steps ahead that staleness allows
    are sampled meanwhile. Dynamic sampling has a round of others beside them.
    """
    groups = (rollout.staleness_bound + 1) * rollout.prompts_per_step
    if rollout.dynamic_sampling:
        groups += round(rollout.oversampling * rollout.prompts_per_step)
    return groups


def count_token_bytes(needs: Needs, num_steps: int, logprob_bytes: int) -> int:
    """Return the bytes of a token without its experts, by the optimizer steps of a rollout."""
    logprobs = 1  # the engine's
    logprobs += num_steps > 1 or needs.old_logprobs
    logprobs += needs.reference
    logprobs += needs.teacher
    others = 1 + 3 * needs.critic  # token ids; values, returns, advantages
    return logprobs * logprob_bytes + others * _NUMBER


def count_expert_bytes(policy: ModelFacts) -> int:
    """Return the bytes of the experts that an engine reports for a token."""
    if not policy.has_experts:
        return 0
    size = 1 if policy.num_experts <= 256 else 2
    return sum(policy.moe_layers) * policy.experts_per_token * size


def count_indexer_bytes(policy: ModelFacts, max_len: int) -> int:
    """Return the bytes of the chosen keys that are kept for a token of a sequence of `max_len`.

    Of tokens that see no more keys than are chosen, none are kept: this is the mean.
    """
    top_k = policy.sizes["index_topk"]
    size = 2 if max_len <= 2**15 else 4
    num_kept = max(max_len - top_k, 0)
    return -(-policy.sizes["layers"] * top_k * size * num_kept // max_len)


def count_store_nodes(rollout: RolloutConfig, plan: PlanConfig) -> int:
    """Return the nodes that have a store: one for each node that begins an engine."""
    per_node = max(1, plan.ranks_per_host // rollout.engine_ranks)
    return -(-rollout.engines // per_node)


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

"""Host memory of the samples, against what a store really keeps."""

import numpy as np
import torch

from mcore_rl.batches.sample_store import SampleStore
from mcore_rl.config import Config
from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.host_memory import StoreMemory, count_groups, count_indexer_bytes
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.types import Prompt, Sample, VersionSpan, WeightVersion
from mcore_rl.weights.hf.config import ModelFacts


def recipe(*overrides: str) -> Config:
    return load_recipe("qwen3_30b_a3b_grpo_32", list(overrides))


def plan_stores(config: Config) -> StoreMemory:
    run = PlannedRun.make(config)
    return StoreMemory.make(run, config.data, config.algorithm, config.drift)


def test_a_store_keeps_as_many_bytes_as_planned() -> None:
    config = recipe("train.mini_batches=2")
    policy = PlannedRun.make(config).models.policy
    num_layers, per_token = sum(policy.moe_layers), policy.experts_per_token
    response = tuple(range(100))
    experts = torch.zeros(20 + 100 - 1, num_layers, per_token, dtype=torch.int16)
    spans = (VersionSpan(0, 100, WeightVersion(0)),)
    prompt = Prompt(0, (1,) * 20, (), "", None)
    logprobs = (0.0,) * 100
    store = SampleStore(policy.num_experts)
    store.put(1, [Sample(prompt, 0, response, logprobs, "stop", spans, "", experts)])
    store.write(np.array([1]), np.array([0]), {"old_logprobs": np.zeros(120, np.float32)})
    without_last = num_layers * per_token  # experts of the last token are not known
    assert store.num_bytes() == 120 * plan_stores(config).token_bytes - without_last


def test_chosen_keys_are_kept_of_tokens_that_choose() -> None:
    policy = ModelFacts.read("recipes/model/deepseek_v32")
    assert count_indexer_bytes(policy, 2048) == 0
    assert count_indexer_bytes(policy, 4096) == 61 * 2048 * 2 // 2
    assert count_indexer_bytes(policy, 2**16) == 61 * 2048 * 4 * (2**16 - 2048) // 2**16


def test_columns_are_those_that_the_algorithm_writes() -> None:
    plain = recipe("drift.routed_experts=false", "train.router_replay=none")
    assert plan_stores(plain).token_bytes == 8
    kl = recipe("drift.routed_experts=false", "train.router_replay=none", "algorithm.kl.coef=0.1")
    assert plan_stores(kl).token_bytes == 12
    kl.rollout.logprob_dtype = "bfloat16"
    assert plan_stores(kl).token_bytes == 8
    ppo = load_recipe("mixtral_8x7b_ppo_16", [])
    experts = 32 * 2
    memory = plan_stores(ppo)
    assert memory.token_bytes in (4 * 5 + experts, 4 * 6 + experts)


def test_steps_ahead_and_rounds_hold_more_groups() -> None:
    for overrides, groups in (
        (("rollout.mode=sync",), 128),
        (("rollout.mode=one_step_off",), 256),
        (("rollout.mode=async", "rollout.max_staleness=3"), 512),
        (("rollout.mode=sync", "rollout.dynamic_sampling=true", "rollout.oversampling=1.5"), 320),
    ):
        assert count_groups(recipe(*overrides).rollout) == groups


def test_a_node_has_its_share() -> None:
    memory = plan_stores(recipe())
    assert memory.num_nodes == 2, "four engines of four ranks"
    assert plan_stores(recipe("rollout.tp=8", "rollout.ep=8")).num_nodes == 4
    whole = 256 * 16 * (2048 + 8192) * memory.token_bytes
    assert memory.num_bytes == whole
    sentence = memory.explain()
    assert f"at most {whole / 2 / 2**30:.1f} GiB on each of 2 nodes" in sentence
    assert "files" not in sentence
    bounded = plan_stores(recipe("rollout.store_gib=2.5")).explain()
    assert bounded.endswith("a token). Beyond rollout.store_gib=2.5 they go to files.")

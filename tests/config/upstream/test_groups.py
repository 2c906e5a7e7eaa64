"""Options for upstream stand in their groups, agree with the recipe's others, and can be unset."""

import pytest

from mcore_rl.config.recipe import load_recipe

DEEPSEEK = "deepseek_v3_grpo_128"


@pytest.mark.parametrize(
    ("recipe", "setting", "message"),
    [
        (DEEPSEEK, "train.megatron.num_layers=3", "train.megatron.num_layers=3: the model's"),
        (DEEPSEEK, "train.ddp.average_in_collective=true", "train.ddp.average_in_collective=true"),
        (DEEPSEEK, "train.optimizer.megatron.adam_eps=1", "set train.optimizer.eps"),
        (DEEPSEEK, "sft.optimizer.megatron.lr=1", "set sft.optimizer.lr"),
        (DEEPSEEK, "judge.sglang.tp_size=2 judge.path=/m", "judge.sglang.tp_size=2: set judge.tp"),
        (
            "mixtral_8x7b_ppo_16",
            "critic.megatron.context_parallel_size=2",
            "set critic.parallel.cp",
        ),
        (
            DEEPSEEK,
            "train.megatron.recompute_num_layers=2",
            "megatron-core reads it only with train.recompute=full",
        ),
        (
            DEEPSEEK,
            "train.megatron.moe_shared_expert_overlap=true",
            "overlaps shared experts with the alltoall dispatcher only",
        ),
        (
            "qwen3_30b_a3b_grpo_8",
            "train.megatron.moe_flex_dispatcher_backend=hybridep",
            "only the flex dispatcher reads it",
        ),
        (
            DEEPSEEK,
            "train.optimizer.megatron.use_precision_aware_optimizer=false",
            "only the precision-aware optimizer has moments",
        ),
        (DEEPSEEK, "train.optimizer.name=muon", "use_precision_aware_optimizer=true with .*muon"),
        (
            "tiny_moe_grpo",
            "train.optimizer.megatron.muon_momentum=0.9",
            "muon_momentum=0.9 with train.optimizer.name=adam: only Muon reads it",
        ),
        (
            "tiny_moe_grpo",
            "train.optimizer.name=muon train.optimizer.megatron.muon_num_ns_steps=0",
            "train.optimizer.megatron.muon_num_ns_steps=0: Muon iterates at least once",
        ),
        (DEEPSEEK, "train.optimizer.name=lion", "use_precision_aware_optimizer=true with .*lion"),
        (
            "tiny_moe_grpo",
            "train.optimizer.name=lion train.optimizer.eps=1e-5",
            "train.optimizer.eps=1e-05 with train.optimizer.name=lion: Lion divides by nothing",
        ),
        (DEEPSEEK, "rollout.attention_dp=1", "SGLang has it for DP attention only"),
        (DEEPSEEK, "rollout.ep=16", "set rollout.ep=32"),
        (
            "tiny_moe_grpo",
            "++rollout.sglang.speculative_ngram_max_bfs_breadth=1",
            "speculative_ngram_max_bfs_breadth=1 with rollout.speculate=none: nothing reads it",
        ),
    ],
)
def test_what_contradicts_the_rest_is_named(recipe: str, setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(recipe, setting.split())


def test_options_are_set_and_unset_on_the_command_line() -> None:
    config = load_recipe(
        DEEPSEEK,
        [
            "train.megatron.moe_z_loss_coeff=0.001",
            "train.megatron.moe_flex_dispatcher_backend=null",
            "++rollout.sglang.chunked_prefill_size=4096",
            "rollout.sglang.moe_dense_tp_size=null",
        ],
    )
    assert config.train.megatron == {
        "moe_token_dispatcher_type": "flex",
        "moe_z_loss_coeff": 0.001,
    }
    assert config.rollout.sglang["chunked_prefill_size"] == 4096
    assert "moe_dense_tp_size" not in config.rollout.sglang

"""config.json reaches megatron-core, and a model that cannot be built is refused by name."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from mcore_rl.config import ParallelConfig, TrainConfig
from mcore_rl.train.transformer_config import (
    _convert_options,
    make_transformer_config,
    rotary_options,
    token_multiple,
)
from mcore_rl.weights.hf.config import pad_vocab_size, read_hf_config
from mcore_rl.weights.models.recipe_checks import check_layout
from tests.support.tiny_models import write_model

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [2],
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}


def read(folder: Path, **changes: Any) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return read_hf_config(folder)


def test_sizes_come_from_config_json(tmp_path: Path) -> None:
    config = read(tmp_path, norm_topk_prob=False)
    parallel = ParallelConfig(tp=2, pp=2, ep=2)
    built = make_transformer_config(config, parallel, torch.bfloat16, TrainConfig(recompute="full"))
    assert (built.kv_channels, built.num_query_groups, built.moe_router_topk) == (16, 2, 2)
    assert built.moe_layer_freq == [1, 1, 0, 1]
    assert built.layernorm_epsilon == 1e-5
    assert built.moe_router_pre_softmax
    assert built.sequence_parallel
    assert built.variable_seq_lengths
    assert built.recompute_granularity == "full"
    assert rotary_options(config)["rotary_base"] == 5e5
    other = config | {"rope_parameters": {"rope_theta": 1e6}}
    assert rotary_options(other)["rotary_base"] == 1e6


@pytest.mark.parametrize(
    ("vocab", "tp", "rows"), [(151936, 1, 151936), (99, 1, 128), (99, 8, 128), (129, 3, 384)]
)
def test_vocabulary_padding(vocab: int, tp: int, rows: int) -> None:
    assert pad_vocab_size({"vocab_size": vocab}, tp) == rows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["NoSuchForCausalLM"]}, "NoSuchForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type='yarn'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn'"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
    ],
)
def test_unsupported_models_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, **changes)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a HuggingFace model directory"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp": 3}, "parallel.tp=3 does not divide num_attention_heads=8"),
        (
            {"pp": 3},
            r"parallel.pp \* parallel.vpp=3 does not divide num_hidden_layers=4 of config.json;"
            r" set parallel.stage_layers=\[2,1,1\]",
        ),
        ({"pp": 2, "vpp": 4}, "=8 does not divide num_hidden_layers=4 .*; lower parallel.pp"),
        ({"ep": 3}, "parallel.ep=3 does not divide the number of experts=8"),
    ],
)
def test_layouts_that_do_not_divide_the_model_are_refused(
    layout: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_layout(CONFIG, ParallelConfig(**layout))


def test_key_value_heads_may_be_fewer_than_tensor_parallel_ranks_but_must_fit_them() -> None:
    check_layout(CONFIG, ParallelConfig(tp=4, ep=2))
    with pytest.raises(ValueError, match=r"parallel.tp=2 neither divides num_key_value_heads=3"):
        check_layout(
            CONFIG | {"num_attention_heads": 6, "num_key_value_heads": 3}, ParallelConfig(tp=2)
        )


def test_a_dense_model_refuses_expert_parallelism() -> None:
    with pytest.raises(ValueError, match=r"parallel.ep=2, but the model has no experts"):
        check_layout(CONFIG | {"architectures": ["Qwen3ForCausalLM"]}, ParallelConfig(tp=2, ep=2))


def test_biases_of_experts_are_not_cut(tmp_path: Path) -> None:
    config = read_hf_config(write_model("gpt_oss", tmp_path))
    with pytest.raises(
        ValueError, match=r"parallel.etp=2, but the experts have biases.* raise parallel.ep"
    ):
        check_layout(config, ParallelConfig(tp=2, etp=2))


def test_gpt_oss_has_windows_sinks_and_a_clamped_gate(tmp_path: Path) -> None:
    config = read_hf_config(write_model("gpt_oss", tmp_path))
    made = make_transformer_config(config, ParallelConfig(), torch.float32, TrainConfig())
    assert (made.window_size, made.window_attn_skip_freq) == ((7, 0), [1, 0, 1, 0])
    assert (made.softmax_type, made.glu_linear_offset) == ("learnable", 1.0)
    assert made.activation_func_clamp_value == 0.5
    assert made.add_bias_linear and not made.apply_rope_fusion
    assert made.yarn_correction_range_round_to_int is False
    assert rotary_options(config)["position_embedding_type"] == "yarn"


def test_a_recipe_passes_fields_on_and_they_win(tmp_path: Path) -> None:
    config = read(tmp_path)
    train = TrainConfig(megatron={"moe_z_loss_coeff": 0.25, "moe_router_dtype": "fp64"})
    built = make_transformer_config(config, ParallelConfig(), torch.float32, train)
    assert (built.moe_z_loss_coeff, built.moe_router_dtype) == (0.25, "fp64")


def test_what_megatron_core_refuses_is_told_with_what_was_passed(tmp_path: Path) -> None:
    config = read(tmp_path)
    train = TrainConfig(megatron={"fp16": True})
    with pytest.raises(ValueError, match=r"train.megatron with .*fp16=True: megatron-core says"):
        make_transformer_config(config, ParallelConfig(), torch.bfloat16, train)


def test_an_attention_kernel_has_one_of_megatrons_names() -> None:
    assert (
        _convert_options({"attention_backend": "flash"})["attention_backend"] is AttnBackend.flash
    )
    with pytest.raises(ValueError, match="attention_backend=fa9: one of flash, fused, unfused"):
        _convert_options({"attention_backend": "fa9"})


@pytest.mark.parametrize(
    ("recompute", "granularity", "modules"),
    [
        ("none", None, None),
        ("selective", "selective", ["layernorm", "moe_act"]),
        ("moe+mlp", "selective", ["mlp", "moe"]),
    ],
)
def test_modules_to_recompute(
    tmp_path: Path, recompute: str, granularity: str | None, modules: list[str] | None
) -> None:
    train = TrainConfig(recompute=recompute)
    built = make_transformer_config(read(tmp_path), ParallelConfig(), torch.float32, train)
    assert built.recompute_granularity == granularity
    assert modules is None or built.recompute_modules == modules
    dense = read_hf_config(write_model("qwen3", tmp_path / "dense"))
    of_dense = make_transformer_config(dense, ParallelConfig(), torch.float32, train)
    left = [name for name in modules or () if not name.startswith("moe")]
    assert of_dense.recompute_modules == left or not left


@pytest.mark.parametrize(
    ("fp8", "recipe", "multiple"),
    [
        (None, "delayed", 1),
        ("hybrid", "delayed", 16),
        ("e4m3", "blockwise", 128),
        ("e4m3", "mxfp8", 32),
    ],
)
def test_tokens_of_a_rank_fill_the_blocks_of_fp8(
    fp8: str | None, recipe: str, multiple: int
) -> None:
    config: Any = SimpleNamespace(fp8=fp8, fp8_recipe=recipe, fp4=None)
    assert token_multiple(config) == multiple

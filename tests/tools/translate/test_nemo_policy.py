"""NeMo-RL's model, layout and batches as options of a recipe."""

from typing import Any

import pytest

from mcore_rl.tools.translate.nemo_policy import (
    is_megatron,
    is_ppo,
    loop_of,
    total_len,
    trainer_gpus,
)
from mcore_rl.tools.translate.translation import ForeignOptions
from tests.tools.translate.accounts import decided, values
from tests.tools.translate.peer_options import nemo

MEGATRON = "policy__megatron_cfg"


def of(**given: Any) -> dict[str, Any]:
    return values(nemo(**given))


def options_of(**given: Any) -> ForeignOptions:
    return ForeignOptions({k.replace("__", "."): v for k, v in given.items()}, is_whole=False)


def test_all_gpus_are_used_by_the_trainers_layout() -> None:
    sizes = {"tensor": 2, "pipeline": 4, "expert": 8}
    given: dict[str, Any] = {
        f"{MEGATRON}__{kind}_model_parallel_size": size for kind, size in sizes.items()
    }
    given |= {"cluster__num_nodes": 4, "cluster__gpus_per_node": 8}
    found = of(**given)
    assert [found[f"parallel.{name}"] for name in ("tp", "pp", "ep", "dp")] == [2, 4, 8, 4]
    assert "policy.megatron_cfg.enabled" in decided(nemo(policy__dtensor_cfg__enabled=True))
    stage = f"{MEGATRON}__num_layers_in_first_pipeline_stage"
    assert stage.replace("__", ".") in decided(nemo(**{stage: 3}))


@pytest.mark.parametrize(
    ("given", "gpus"),
    [
        ({}, (16, 0)),
        ({"colocated__enabled": False, "colocated__resources__num_nodes": 1}, (8, 8)),
        ({"colocated__enabled": False, "colocated__resources__gpus_per_node": 4}, (12, 4)),
    ],
)
def test_engines_may_have_gpus_of_their_own(given: dict[str, Any], gpus: tuple[int, int]) -> None:
    cluster = {"cluster__num_nodes": 2, "cluster__gpus_per_node": 8}
    own = {f"policy__generation__{name}": value for name, value in given.items()}
    assert trainer_gpus(options_of(**cluster, **own)) == gpus


def test_the_options_say_what_trains() -> None:
    ppo = options_of(ppo__seed=3)
    assert is_ppo(ppo) and loop_of(ppo) == "ppo" and loop_of(options_of()) == "grpo"
    assert is_megatron(options_of(policy__megatron_cfg__context_parallel_size=2))
    assert not is_megatron(options_of()) and total_len(options_of()) == 512


def test_batches_are_counted_in_tokens_and_mini_batches() -> None:
    given = {"grpo__num_prompts_per_step": 64, "grpo__num_generations_per_prompt": 8}
    assert of(**given, policy__train_global_batch_size=128)["train.mini_batches"] == 4
    size = {"policy__train_global_batch_size": 100}
    assert "policy.train_global_batch_size" in decided(nemo(**given, **size))
    name = "train.max_tokens_per_microbatch"
    total = {"policy__max_total_sequence_length": 1000}
    assert of(**total)[name] == 4000
    assert of(**total, policy__sequence_packing__train_mb_tokens=1500)[name] == 1500
    plain = {"policy__sequence_packing__enabled": False, "policy__train_micro_batch_size": 2}
    assert of(**total, **plain)[name] == 2000


def test_fields_of_megatron_are_handed_on() -> None:
    given = {"apply_rope_fusion": False, "attention_backend": "flash", "moe_router_dtype": "fp64"}
    found = of(**{f"{MEGATRON}__{name}": value for name, value in given.items()})
    assert {name: found[f"train.megatron.{name}"] for name in given} == given
    fp8 = of(**{f"{MEGATRON}__fp8_cfg__enabled": True})
    assert fp8["train.megatron.fp8"] == "e4m3"
    assert fp8["train.megatron.fp8_recipe"] == "blockwise"
    assert of(**{f"{MEGATRON}__freeze_moe_router": True})["train.freeze_router"]


@pytest.mark.parametrize(
    ("given", "recompute"),
    [
        ({"activation_checkpointing": True}, "full"),
        ({"activation_checkpointing": True, "recompute_granularity": "selective"}, "core_attn"),
        ({"activation_checkpointing": False, "recompute_granularity": "full"}, None),
    ],
)
def test_recomputation(given: dict[str, Any], recompute: str | None) -> None:
    found = of(**{f"{MEGATRON}__{name}": value for name, value in given.items()})
    assert found.get("train.recompute") == recompute


def test_adapters_variables_and_other_models_are_left_to_the_user() -> None:
    names = ("peft__enabled", "env_vars__X", "mtp_num_layers")
    for name in names:
        option = f"{MEGATRON}__{name}"
        assert option.replace("__", ".") in decided(nemo(**{option: 1}))
    assert "policy.tokenizer.name" in decided(nemo(policy__tokenizer__name="other"))


def test_a_frozen_router_learns_no_balance() -> None:
    rate = f"{MEGATRON}__moe_router_bias_update_rate"
    assert of(**{rate: 0.001})["train.router_bias_rate"] == 0.001
    frozen = nemo(**{rate: 0.001, f"{MEGATRON}__freeze_moe_router": True})
    assert values(frozen)["train.freeze_router"] and "train.router_bias_rate" not in values(frozen)
    assert rate.replace("__", ".") in decided(frozen)

"""verl's model, layout, optimizer and step as options of a recipe."""

from typing import Any

import pytest

from mcore_rl.tools.translate.systems import complete
from mcore_rl.tools.translate.translation import ForeignOptions
from mcore_rl.tools.translate.verl import translate_verl
from mcore_rl.tools.translate.verl_shared import ACTOR, MODEL, home_of, is_megatron
from tests.tools.translate.accounts import decided, values
from tests.tools.translate.verl_options import translate

A, M = ACTOR.replace(".", "__"), MODEL.replace(".", "__")
MEGATRON = f"{A}__megatron"


def of(**given: Any) -> dict[str, Any]:
    return values(translate(**given))


def test_all_gpus_are_used_by_the_trainers_layout() -> None:
    sizes = {"tensor": 2, "pipeline": 4, "expert": 8}
    given: dict[str, Any] = {
        f"{MEGATRON}__{kind}_model_parallel_size": size for kind, size in sizes.items()
    }
    found = of(**given, trainer__nnodes=4)
    assert [found.get(f"parallel.{name}") for name in ("tp", "pp", "ep", "dp")] == [2, 4, 8, 4]
    # verl leaves it to Megatron, which takes that of the dense layers.
    assert found["parallel.etp"] == 2
    assert "parallel.etp" not in of(**given, **{f"{MEGATRON}__expert_tensor_parallel_size": 1})


@pytest.mark.parametrize(
    ("gpus", "engine", "sequence", "layout"),
    [(8, 2, 1, (2, 1, 8)), (8, 4, 2, (4, 2, 2)), (8, 16, 1, (8, 1, 2)), (1, 2, 1, (1, 1, 2))],
)
def test_what_fsdp_trains_is_divided_as_in_the_engines(
    gpus: int, engine: int, sequence: int, layout: tuple[int, int, int]
) -> None:
    """FSDP shards weights over data-parallel ranks, which keep a whole copy here."""
    found = of(
        trainer__nnodes=2,
        trainer__n_gpus_per_node=gpus,
        actor_rollout_ref__rollout__tensor_model_parallel_size=engine,
        **{f"{A}__ulysses_sequence_parallel_size": sequence},
    )
    assert tuple(found[f"parallel.{name}"] for name in ("tp", "cp", "dp")) == layout


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 3000}, 6000),
        ({"ppo_micro_batch_size_per_gpu": 3}, 3 * 150),
        ({"ppo_micro_batch_size_per_gpu": 300}, 16384),  # what verl takes where it counts tokens
    ],
)
def test_micro_batches_are_counted_in_tokens(given: dict[str, Any], tokens: int) -> None:
    options: dict[str, Any] = {f"{A}__{name}": value for name, value in given.items()}
    options |= {f"{MEGATRON}__context_parallel_size": 2}
    found = of(**options, data__max_prompt_length=100, data__max_response_length=50)
    assert found["train.max_tokens_per_microbatch"] == tokens


def test_mini_batches_are_counted_instead_of_their_prompts() -> None:
    size = f"{A}__ppo_mini_batch_size"
    even = translate(**{"data__train_batch_size": 512, size: 128})
    assert values(even)["train.mini_batches"] == 4
    uneven = translate(**{"data__train_batch_size": 100, size: 30})
    assert values(uneven)["train.mini_batches"] == 3
    assert f"{ACTOR}.ppo_mini_batch_size" in decided(uneven) - decided(even)


@pytest.mark.parametrize(
    ("granularity", "modules", "recompute"),
    [
        ("full", ["core_attn"], "full"),
        ("selective", ["core_attn", "layernorm"], "core_attn+layernorm"),
        (None, ["core_attn"], None),
    ],
)
def test_recomputation(granularity: str | None, modules: list[str], recompute: str | None) -> None:
    config = f"{MEGATRON}__override_transformer_config"
    given = {f"{config}__recompute_modules": modules}
    found = of(**given, **{f"{config}__recompute_granularity": granularity})
    assert found.get("train.recompute") == recompute


def test_schedules_have_steps_and_a_least_rate() -> None:
    optim = f"{A}__optim"
    given: dict[str, Any] = {
        f"{optim}__lr": 1e-5,
        f"{optim}__lr_decay_style": "cosine",
        f"{optim}__lr_warmup_steps_ratio": 0.1,
        f"{optim}__min_lr_ratio": 0.1,
        f"{optim}__betas": [0.8, 0.95],
        f"{A}__grad_clip": 0.5,
    }
    found = of(**given, trainer__total_training_steps=200)
    wanted = {"lr": 1e-5, "schedule": "cosine", "warmup_steps": 20, "beta1": 0.8, "clip_grad": 0.5}
    assert {name: found[f"train.optimizer.{name}"] for name in wanted} == wanted
    assert found["train.optimizer.min_lr"] == pytest.approx(1e-6)
    unknown = translate(**{f"{optim}__lr_decay_style": "WSD"})
    assert f"{ACTOR}.optim.lr_decay_style" in decided(unknown)


def test_replay_offloading_and_frozen_parts() -> None:
    given: dict[str, Any] = {
        f"{A}__router_replay__mode": "R3",
        f"{MEGATRON}__param_offload": True,
        f"{A}__freeze_vision_tower": True,
        f"{M}__override_config__moe_config__freeze_moe_router": True,
    }
    found = of(**given)
    assert found["train.router_replay"] == "engine" and found["train.vision"] == "none"
    assert found["cluster.offload"] and found["train.freeze_router"]
    moved = of(**{f"{MEGATRON}__router_replay__mode": "R2"})
    assert moved["train.router_replay"] == "old_pass"
    assert of(**{f"{A}__router_replay__mode": "R2"})["train.router_replay"] == "old_pass"


def test_muon_has_its_options() -> None:
    optim = f"{A}__optim"
    given: dict[str, Any] = {f"{A}__strategy": "megatron", f"{optim}__optimizer": "muon"}
    found = of(**given, **{f"{optim}__muon_momentum": 0.9})
    assert found["train.optimizer.name"] == "muon"
    assert found["train.optimizer.megatron.muon_momentum"] == 0.9
    matching = translate(**given, **{f"{optim}__muon_match_adamw_update_rms": True})
    [advice] = [d.advice for d in matching.decisions if "update_rms" in d.source]
    assert "muon_extra_scale_factor to 0.2294" in advice
    other = translate(**{**given, f"{optim}__optimizer": "sgd"})
    assert f"{ACTOR}.optim.optimizer" in decided(other)


def test_moments_have_the_precision_that_is_asked_for() -> None:
    given: dict[str, Any] = {f"{A}__strategy": "megatron", f"{A}__optim__exp_avg_dtype": "bf16"}
    assert "train.optimizer.megatron.exp_avg_dtype" not in of(**given)
    found = of(**given, **{f"{A}__optim__use_precision_aware_optimizer": True})
    assert found["train.optimizer.megatron.exp_avg_dtype"] == "bfloat16"
    assert found["train.optimizer.megatron.exp_avg_sq_dtype"] == "float32"


@pytest.mark.parametrize("name", ["use_megatron_fsdp", "dynamic_context_parallel", "qat__enable"])
def test_ways_to_shard_and_round_that_are_not_here_are_left_to_the_user(name: str) -> None:
    given = {f"{MEGATRON}__{name}": True}
    assert f"{ACTOR}.megatron.{name.replace('__', '.')}" in decided(translate(**given))


def test_the_engine_that_trains_has_a_name() -> None:
    assert f"{ACTOR}.strategy" not in decided(translate(model_engine="megatron"))
    assert "model_engine" in decided(translate(model_engine="veomni"))
    changed = translate(**{f"{M}__override_config__num_hidden_layers": 4})
    assert f"{MODEL}.override_config.num_hidden_layers" in decided(changed)


def test_adapters_and_fsdp_are_left_to_the_user() -> None:
    on_megatron = {"actor_rollout_ref__actor__strategy": "megatron"}
    lora = translate(**on_megatron, **{f"{M}__lora_rank": 8, f"{M}__lora__rank": 8})
    assert {f"{MODEL}.lora_rank", f"{MODEL}.lora.rank"} <= decided(lora)
    assert "train.lora.rank" not in values(lora)


def test_factors_of_peft_are_those_of_a_recipe() -> None:
    given = {"rank": 8, "alpha": 32, "adapter_path": "/adapter"}
    of_policy = {f"{M}__lora_{name}": value for name, value in given.items()}
    translation = translate(**of_policy, **{f"{M}__target_modules": ["q_proj", "v_proj"]})
    found = values(translation)
    wanted = {"rank": 8, "alpha": 32.0, "path": "/adapter", "targets": ["q_proj", "v_proj"]}
    assert {name: found[f"train.lora.{name}"] for name in wanted} == wanted
    assert complete(translation).explain_refusal() is None
    assert "train.lora.targets" not in values(translate(**{f"{M}__lora_rank": 8}))
    critic = {"algorithm__adv_estimator": "gae", "critic__model__lora_rank": 8}
    begun = translate(**critic, critic__model__lora_adapter_path="/adapter")
    assert "critic.model.lora_adapter_path" in decided(begun)
    assert f"{ACTOR}.strategy" in decided(translate())
    assert f"{ACTOR}.strategy" not in decided(translate(**{f"{A}__strategy": "megatron"}))


@pytest.mark.parametrize("name", ["ppo_megatron_trainer", "ppo_megatron_trainer.yaml"])
def test_the_name_of_the_configuration_says_that_megatron_trains(name: str) -> None:
    options = ForeignOptions({}, is_whole=False, config_name=name)
    assert is_megatron(options)
    assert f"{ACTOR}.strategy" not in decided(translate_verl(options))
    assert not is_megatron(ForeignOptions({}, is_whole=False, config_name="ppo_trainer"))


def test_a_tilde_is_the_users_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert home_of("~/models/x") == "/home/ada/models/x"
    assert home_of("org/name") == "org/name"

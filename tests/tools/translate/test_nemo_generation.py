"""NeMo-RL's engines and sampling as options of a recipe."""

from typing import Any

import pytest

from mcore_rl.tools.translate.nemo_policy import ENGINE_SIZES, GENERATION, SHARES
from tests.tools.translate.accounts import decided, values
from tests.tools.translate.peer_options import nemo

G = GENERATION.replace(".", "__")
CLUSTER = {"cluster__num_nodes": 2, "cluster__gpus_per_node": 8}


def of(**given: Any) -> dict[str, Any]:
    return values(nemo(**given))


@pytest.mark.parametrize("backend", ENGINE_SIZES)
def test_engines_of_each_kind_share_the_trainers_gpus(backend: str) -> None:
    tp = f"{G}__{ENGINE_SIZES[backend]['tp'].replace('.', '__')}"
    translation = nemo(**CLUSTER, **{f"{G}__backend": backend, tp: 4})
    found = values(translation)
    assert found["rollout.tp"] == 4 and found["rollout.engines"] == 4
    assert found["cluster.colocated"] and found["cluster.offload"]
    assert SHARES[backend] in decided(translation)


@pytest.mark.parametrize("backend", ["vllm", "megatron"])
def test_replicas_of_attention_share_the_experts_of_an_engine(backend: str) -> None:
    tp, ep = (ENGINE_SIZES[backend][name].replace(".", "__") for name in ("tp", "ep"))
    given = {f"{G}__backend": backend, f"{G}__{tp}": 2, f"{G}__{ep}": 8}
    found = of(**CLUSTER, **given)
    assert found["rollout.tp"] == found["rollout.ep"] == 8
    assert found["rollout.attention_dp"] == 4 and found["rollout.engines"] == 2


def test_engines_with_gpus_of_their_own() -> None:
    apart = {f"{G}__colocated__enabled": False, f"{G}__colocated__resources__num_nodes": 1}
    found = of(**CLUSTER, **apart, **{f"{G}__vllm_cfg__tensor_parallel_size": 2})
    assert found["rollout.engines"] == 4 and found["parallel.dp"] == 8
    assert "cluster.colocated" not in found
    given = {"enabled": True, "max_trajectory_age_steps": 3, "in_flight_weight_updates": True}
    asynchronous = {f"grpo__async_grpo__{name}": value for name, value in given.items()}
    found = of(**CLUSTER, **apart, **asynchronous)
    assert found["rollout.mode"] == "async" and found["rollout.max_staleness"] == 3
    assert found["rollout.partial"] == "continue"
    assert found["algorithm.correction.weight"] == "none"
    corrected = {"loss_fn__use_importance_sampling_correction": True}
    found = of(**CLUSTER, **apart, **asynchronous, **corrected)
    assert found["algorithm.correction.weight"] == "token"
    assert "grpo.async_grpo.enabled" in decided(nemo(**asynchronous))
    of_ppo = {name.replace("grpo", "ppo"): value for name, value in asynchronous.items()}
    assert of(**CLUSTER, **apart, **of_ppo)["rollout.mode"] == "async"
    assert "ppo.async_ppo.enabled" in decided(nemo(**of_ppo))


@pytest.mark.parametrize(
    ("given", "lengths", "is_shared"),
    [
        ({}, (256, 256), True),
        ({"data__max_input_seq_length": 100}, (100, 412), True),
        ({f"{G}__max_new_tokens": 400}, (112, 400), True),
        ({"data__max_input_seq_length": 100, f"{G}__max_new_tokens": 400}, (100, 400), False),
    ],
)
def test_prompts_and_responses_have_bounds_of_their_own(
    given: dict[str, Any], lengths: tuple[int, int], is_shared: bool
) -> None:
    translation = nemo(**given)
    found = values(translation)
    assert (found["data.max_prompt_len"], found["rollout.max_response_len"]) == lengths
    assert ("policy.max_total_sequence_length" in decided(translation)) == is_shared


def test_precisions_of_engines() -> None:
    assert of(**{f"{G}__vllm_cfg__precision": "fp8"})["rollout.quantization"] == "fp8"
    found = of(**{f"{G}__vllm_cfg__kv_cache_dtype": "fp8"})
    assert found["rollout.sglang.kv_cache_dtype"] == "fp8_e4m3"


def test_options_of_sglang_are_handed_on_and_those_of_vllm_are_not() -> None:
    found = of(**{f"{G}__backend": "sglang", f"{G}__sglang_cfg__attention_backend": "fa3"})
    assert found["rollout.sglang.attention_backend"] == "fa3"
    assert f"{GENERATION}.vllm_kwargs.moe_backend" in decided(
        nemo(**{f"{G}__vllm_kwargs__moe_backend": "triton"})
    )


def test_dynamic_sampling_and_turns() -> None:
    given = {"grpo__use_dynamic_sampling": True, "grpo__batch_multiplier": 2}
    found = of(**given, grpo__dynamic_sampling_max_gen_batches=5)
    assert found["rollout.dynamic_sampling"] and found["rollout.oversampling"] == 2
    assert found["rollout.max_rounds"] == 5
    several = nemo(grpo__max_rollout_turns=9)
    assert "grpo.max_rollout_turns" in decided(several) and several.explain_refusal() is None

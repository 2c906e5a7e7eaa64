"""verl's engines, sampling and turns as options of a recipe."""

from typing import Any

from mcore_rl.tools.translate.verl_shared import ROLLOUT
from mcore_rl.tools.translate.verl_training import TURNS
from tests.tools.translate.accounts import decided, values
from tests.tools.translate.verl_options import translate

R, T = ROLLOUT.replace(".", "__"), TURNS.replace(".", "__")


def of(**given: Any) -> dict[str, Any]:
    return values(translate(**given))


def test_engines_fill_the_trainers_gpus() -> None:
    found = of(**{f"{R}__tensor_model_parallel_size": 4}, trainer__nnodes=2)
    assert found["rollout.engines"] == 4 and found["rollout.tp"] == 4
    assert found["cluster.colocated"]
    assert found["rollout.stage_weights"] is False and found["rollout.restarts"] == 0


def test_replicas_of_attention_share_the_experts_of_an_engine() -> None:
    given: dict[str, Any] = {
        f"{R}__tensor_model_parallel_size": 4,
        f"{R}__expert_parallel_size": 32,
    }
    found = of(**given, **{f"{R}__data_parallel_size": 8}, trainer__nnodes=8)
    assert found["rollout.tp"] == 32 == found["rollout.ep"]
    assert found["rollout.attention_dp"] == 8 and found["rollout.engines"] == 2


def test_engines_on_nodes_of_their_own() -> None:
    given: dict[str, Any] = {f"{R}__nnodes": 3, f"{R}__tensor_model_parallel_size": 8}
    found = of(**given, trainer__nnodes=2)
    assert found["rollout.engines"] == 3
    assert "cluster.colocated" not in found
    assert {f"{ROLLOUT}.nnodes", "trainer.nnodes"} <= decided(translate(**given))


def test_sampling_and_options_of_sglang() -> None:
    given: dict[str, Any] = {
        f"{R}__n": 8,
        f"{R}__temperature": 0.7,
        f"{R}__val_kwargs__n": 16,
        f"{R}__engine_kwargs__sglang__attention_backend": "fa3",
        f"{R}__engine_kwargs__sglang__tp_size": 4,
        f"{R}__quantization": "fp8",
    }
    translation = translate(**given)
    found = values(translation)
    assert found["rollout.samples_per_prompt"] == 8 and found["rollout.temperature"] == 0.7
    assert found["eval.pass_k"] == 16 and found["rollout.quantization"] == "fp8"
    assert found["rollout.sglang.attention_backend"] == "fa3"
    drawn = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "n": 4}
    found = values(translate(**{f"{R}__val_kwargs__{name}": v for name, v in drawn.items()}))
    assert (found["eval.samples"], found["eval.pass_k"]) == (4, 4)
    assert (found["eval.temperature"], found["eval.top_p"]) == (0.6, 0.95)
    refused = f"{ROLLOUT}.engine_kwargs.sglang.tp_size"
    assert refused in decided(translation)


def test_tools_and_interactions_are_environments() -> None:
    enabled = {f"{T}__enable": True}
    tools = {f"{T}__tool_config_path": "tools.yaml", f"{T}__max_assistant_turns": 5}
    found = of(**enabled, **tools)
    assert found["agents.environment"] == "verl_tools" and found["agents.max_turns"] == 5
    assert found["agents.options.config"] == "tools.yaml"
    both = translate(**enabled, **tools, **{f"{T}__interaction_config_path": "i.yaml"})
    assert values(both)["agents.environment"] == "verl_interaction"
    assert f"{TURNS}.tool_config_path" in decided(both)
    assert "agents.environment" not in of(**tools)
    alone = translate(**enabled, **{f"{T}__max_assistant_turns": 5})
    assert {f"{TURNS}.enable", f"{TURNS}.max_assistant_turns"} <= decided(alone)
    assert alone.explain_refusal() is None


def test_functions_as_tools_are_left_to_the_user() -> None:
    name = f"{T}__function_tool_path"
    given = {name: "f.py", f"{T}__enable": True}
    assert f"{TURNS}.function_tool_path" in decided(translate(**given))


def test_the_asynchronous_trainer_has_engines_of_its_own() -> None:
    mode: dict[str, Any] = {"trainer__v1__trainer_mode": "separate_async"}
    apart: dict[str, Any] = {**mode, f"{R}__nnodes": 1}
    translation = translate(**apart)
    found = values(translation)
    assert found["rollout.mode"] == "async" and found["rollout.stale"] == "drop"
    assert found["rollout.max_staleness"] == 7  # eight versions, the newest included
    assert f"{ROLLOUT}.nnodes" not in decided(translation)
    sampler = "trainer__v1__sampler__max_off_policy_"
    waits = of(**apart, **{f"{sampler}threshold": 3, f"{sampler}strategy": "wait"})
    assert (waits["rollout.max_staleness"], waits["rollout.stale"]) == (2, "wait")
    assert of(**apart, **{f"{sampler}threshold": None})["rollout.stale"] == "correct"
    for given in (mode, {"trainer__v1__trainer_mode": "colocate_async"}):
        assert "trainer.v1.trainer_mode" in decided(translate(**given))
        assert "rollout.mode" not in of(**given)


def test_requests_are_seeded_where_runs_have_to_be_equal() -> None:
    assert of(**{f"{R}__full_determinism": True})["rollout.deterministic"] is True

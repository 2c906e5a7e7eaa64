"""verl's engines, sampling and turns as options of a recipe."""

from typing import Any

from mcore_rl.tools.translate.verl_training import ROLLOUT, TURNS
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
    assert f"{TURNS}.enable" in decided(translate(**enabled))

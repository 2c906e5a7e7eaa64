"""slime's model, layout and engines as options of a recipe."""

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.tools.translate.slime_training import PLACES, first_given, has_critic, trainer_ranks
from mcore_rl.tools.translate.translation import ForeignOptions
from tests.tools.translate.accounts import decided, values
from tests.tools.translate.peer_options import slime


def of(**given: Any) -> dict[str, Any]:
    return values(slime(**given))


def test_all_gpus_are_used_by_the_trainers_layout() -> None:
    sizes = {"tensor": 2, "pipeline": 4, "expert": 8}
    given: dict[str, Any] = {f"{kind}_model_parallel_size": size for kind, size in sizes.items()}
    found = of(**given, actor_num_nodes=4)
    assert [found[f"parallel.{name}"] for name in ("tp", "pp", "ep", "dp")] == [2, 4, 8, 4]
    # slime leaves it to Megatron, which takes that of the dense layers.
    assert found["parallel.etp"] == 2
    assert "parallel.etp" not in of(**given, expert_tensor_parallel_size=1)
    options = ForeignOptions({PLACES[0]: 2, PLACES[1]: 4}, is_whole=False)
    assert trainer_ranks(options) == 8 and not has_critic(options)


@pytest.mark.parametrize(
    ("ends", "stages"),
    [
        ({"decoder_last_pipeline_num_layers": 13}, [16, 16, 16, 13]),
        (
            {"decoder_first_pipeline_num_layers": 14, "decoder_last_pipeline_num_layers": 15},
            [14, 16, 16, 15],
        ),
        ({"decoder_first_pipeline_num_layers": 14}, None),
    ],
)
def test_stages_are_counted_where_the_ends_are_given(
    ends: dict[str, int], stages: list[int] | None
) -> None:
    given = {"num_layers": 61, "pipeline_model_parallel_size": 4, **ends}
    translation = slime(**given)
    assert values(translation).get("parallel.stage_layers") == stages
    names = {f"--{name.replace('_', '-')}" for name in ends}
    assert (names <= decided(translation)) == (stages is None)
    without = slime(**{**given, "num_layers": None})
    assert names <= decided(without)


def test_virtual_stages() -> None:
    given = {"num_layers": 48, "pipeline_model_parallel_size": 4}
    assert of(**given, num_layers_per_virtual_pipeline_stage=6)["parallel.vpp"] == 2
    assert of(num_virtual_stages_per_pipeline_rank=3)["parallel.vpp"] == 3


@pytest.mark.parametrize(
    ("granularity", "modules", "recompute"),
    [
        ("full", "core_attn", "full"),
        ("selective", ["core_attn", "layernorm"], "core_attn+layernorm"),
        (None, "core_attn", None),
    ],
)
def test_recomputation(granularity: str | None, modules: Any, recompute: str | None) -> None:
    found = of(recompute_granularity=granularity, recompute_modules=modules)
    assert found.get("train.recompute") == recompute


def test_engines_share_the_trainers_gpus_or_have_their_own() -> None:
    given = {"colocate": True, "actor_num_nodes": 2, "rollout_num_gpus_per_engine": 4}
    found = of(**given, sglang_pp_size=2)
    assert found["rollout.engines"] == 4
    assert found["rollout.tp"] == 2 and found["rollout.pp"] == 2
    assert found["cluster.colocated"] and found["cluster.offload"]
    assert not of(**given, no_offload_train=True)["cluster.offload"]
    apart = of(rollout_num_gpus=6, rollout_num_gpus_per_engine=2)
    assert apart["rollout.engines"] == 3 and "cluster.colocated" not in apart
    assert "--rollout-num-gpus" in decided(slime())


def test_an_option_may_have_several_names() -> None:
    options = ForeignOptions({"--b": 3}, is_whole=False)
    assert first_given(options, ("--a", "--b"), 1) == ("--b", 3)
    assert first_given(options, ("--c", "--d"), 1) == ("--c", 1)
    assert of(sglang_data_parallel_size=8)["rollout.attention_dp"] == 8


def test_a_checkpoint_of_megatron_is_left_to_the_user() -> None:
    assert "--load" not in decided(slime(load="/a", save="/a"))
    assert "--load" in decided(slime(load="/a", save="/b"))
    assert of(hf_checkpoint="/models/x/")["model.path"] == "/models/x"


def test_layers_are_those_of_the_model_where_the_script_does_not_say(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 78}')
    given = {"pipeline_model_parallel_size": 4, "decoder_last_pipeline_num_layers": 18}
    translation = slime(**given, hf_checkpoint=str(tmp_path))
    assert values(translation)["parallel.stage_layers"] == [20, 20, 20, 18]


@pytest.mark.parametrize(
    ("given", "least"),
    [
        ({}, 512),
        ({"sglang_server_concurrency": 64}, 64),
        ({"sglang_max_running_requests": 48}, 48),
        ({"sglang_server_concurrency": 64, "sglang_max_running_requests": 128}, 64),
    ],
)
def test_the_lower_bound_of_requests_holds(given: dict[str, int], least: int) -> None:
    translation = slime(**given)
    assert values(translation)["rollout.max_concurrency"] == least
    assert "--sglang-max-running-requests" not in decided(translation)

"""Pipelines whose first and last stage have other numbers of layers than the rest."""

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.tools.translate.stages import read_num_experts, read_num_layers, translate_ends
from mcore_rl.tools.translate.translation import Decision, RecipeLine
from tests.tools.translate.accounts import decided, values
from tests.tools.translate.peer_options import nemo
from tests.tools.translate.verl_options import translate


@pytest.mark.parametrize(
    ("pp", "first", "last", "layers", "stages"),
    [
        (4, 4, 5, 61, [4, 26, 26, 5]),
        (12, None, 6, 61, [*[5] * 11, 6]),
        (2, 30, None, 62, [30, 32]),
        (4, 4, 5, 62, None),
        (2, 3, 4, 7, [3, 4]),
        (2, 3, 4, 8, None),
        (1, 3, 4, 7, None),
        (4, 4, 5, None, None),
        (8, 4, 5, 12, None),
    ],
)
def test_the_other_stages_share_the_rest(
    pp: int, first: int | None, last: int | None, layers: int | None, stages: list[int] | None
) -> None:
    found = list(translate_ends("parallel", pp, {"first": first, "last": last}, layers, ("of",)))
    if stages is None:
        assert all(isinstance(item, Decision) and "stage_layers" in item.advice for item in found)
        assert len(found) == (first is not None) + (last is not None)
    else:
        given = tuple(n for n, value in (("first", first), ("last", last)) if value is not None)
        assert found == [RecipeLine("parallel.stage_layers", stages, (*given, "of"))]


def test_layers_are_read_where_the_model_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 10}))
    assert read_num_layers(str(tmp_path)) == 10
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 12}}))
    assert read_num_layers(str(tmp_path)) == 12
    (tmp_path / "config.json").write_text("no JSON")
    assert read_num_layers(str(tmp_path)) is None and read_num_layers("org/name") is None


def test_verl_and_nemo_rl_name_the_layers_of_an_end(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 10}))
    group = "actor_rollout_ref.actor.megatron"
    override = f"{group}.override_transformer_config"
    last = f"{override}.num_layers_in_last_pipeline_stage"
    split = f"{override}.account_for_loss_in_pipeline_split"
    given: dict[str, Any] = {f"{group}.pipeline_model_parallel_size": 4, last: 1, split: False}
    elsewhere = translate(**given)
    assert last in decided(elsewhere) and "parallel.stage_layers" not in values(elsewhere)
    here = translate(**given, actor_rollout_ref__model__path=str(tmp_path))
    assert values(here)["parallel.stage_layers"] == [3, 3, 3, 1]
    assert not {last, split} & decided(here)
    assert split in decided(translate(**{**given, split: True}))
    theirs = "policy.megatron_cfg"
    found = nemo(
        **{
            f"{theirs}.pipeline_model_parallel_size": 2,
            f"{theirs}.num_layers_in_first_pipeline_stage": 4,
            "policy.model_name": str(tmp_path),
        }
    )
    assert values(found)["parallel.stage_layers"] == [4, 6]


@pytest.mark.parametrize("name", ["num_experts", "n_routed_experts", "num_local_experts"])
def test_experts_that_fsdp_shards_are_divided_among_the_gpus_of_a_node(
    tmp_path: Path, name: str
) -> None:
    given = {"actor_rollout_ref__model__path": str(tmp_path), "trainer__nnodes": 2}
    assert "parallel.ep" not in values(translate(**given)), "no config.json is here"
    (tmp_path / "config.json").write_text(json.dumps({name: 60}))
    assert read_num_experts(str(tmp_path)) == 60
    assert values(translate(**given))["parallel.ep"] == 4
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    assert "parallel.ep" not in values(translate(**given)), "the model has no experts"
    on_megatron = {**given, "actor_rollout_ref__actor__strategy": "megatron"}
    (tmp_path / "config.json").write_text(json.dumps({name: 60}))
    assert "parallel.ep" not in values(translate(**on_megatron))

"""Options of prompts: a curriculum's stages and the sources must make sense."""

from typing import Any

import pytest

from mcore_rl.config import CurriculumConfig, SourceConfig, StageConfig
from mcore_rl.config.data import DataConfig
from mcore_rl.config.recipe import load_recipe


def test_a_recipe_names_sources_and_stages() -> None:
    config = load_recipe(
        "tiny_moe_grpo",
        [
            "data.train=[]",
            "data.sources=[{path: a.jsonl, weight: 2}, {path: b}]",
            "data.curriculum.column=extra_info.level",
            "data.curriculum.stages=[{most: 2}, {after: 100, most: 5}]",
        ],
    )
    assert config.data.sources == [SourceConfig("a.jsonl", 2.0), SourceConfig("b", 1.0)]
    assert config.data.curriculum.stages == [StageConfig(0, most=2), StageConfig(100, most=5)]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.sources=[{path: a, weight: 0}]", r"data.sources.weight=0.0: must be greater than 0"),
        ("data.sources=[{path: a, weight: -1}]", r"weight=-1.0: must be greater than 0"),
        ("data.sources=[{weight: 1}]", r"data.sources\[0\].path is empty: give a file"),
        ("data.sources=[{path: a, wight: 1}]", r"unknown key 'wight'"),
        ("data.curriculum.solved=0", r"data.curriculum.solved=0.0: must lie in \(0, 1\]"),
    ],
)
def test_wrong_values_in_a_recipe_are_refused(setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("tiny_moe_grpo", ["data.train=[]", setting])


def test_prompts_are_named_in_one_way() -> None:
    with pytest.raises(ValueError, match=r"data.train=\['a'\] and data.sources with 1 entries"):
        DataConfig(train=["a"], sources=[SourceConfig("b")])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": "d", "stages": []}, "column='d' with 0 data.curriculum.stages"),
        ({"stages": [{}]}, "column='' with 1 data.curriculum.stages: a column needs stages"),
        ({"stages": [{"after": 9, "most": 1}]}, "the first has after=9; it must have after=0"),
        (
            {"stages": [{"most": 1}, {"after": 9, "most": 2}, {"after": 9, "most": 3}]},
            "after=9 follows after=9; order the stages",
        ),
        ({"stages": [{"most": 1}, {"after": 9}]}, "some have a most and some have none"),
        ({"stages": [{"least": 2, "most": 1}]}, "least=2 is above most=1, after=0"),
    ],
)
def test_stages_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    stages = [StageConfig(**stage) for stage in options["stages"]]
    column = options.get("column", "" if options["stages"] == [{}] else "d")
    with pytest.raises(ValueError, match=message):
        CurriculumConfig(column=column, stages=stages)


def test_a_rehearsal_reads_one_small_file() -> None:
    config = DataConfig(
        sources=[SourceConfig("a")],
        curriculum=CurriculumConfig(column="d", stages=[StageConfig(most=1)]),
        workers=5,
    )
    reduced = config.reduce_to("small.parquet", 16)
    assert reduced == DataConfig(train=["small.parquet"], max_prompt_len=16, workers=5)
    assert not reduced.curriculum.is_used and config.curriculum.is_used

"""Which data sets are streamed, and the stream that a recipe's options open."""

import logging
import re
from functools import partial
from pathlib import Path

import pytest

from mcore_rl.config import CurriculumConfig, DataConfig, SourceConfig, StageConfig
from mcore_rl.config.recipe import load_recipe
from mcore_rl.data.streamed.mixed import MixedPrompts
from mcore_rl.data.streamed.open import is_streamed, open_prompts
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.tasks.arithmetic import make_tokenizer
from tests.support.policy import ROOT
from tests.support.prompt_sets import are_right, numbers_of, write_rows


@pytest.fixture
def folder(tmp_path: Path) -> str:
    write_rows(tmp_path / "set", [30, 20])
    write_rows(tmp_path / "set" / "more", [10], "jsonl")
    return str(tmp_path / "set")


def open_here(config: DataConfig, seed: int = 0) -> MixedPrompts:
    return open_prompts(config, seed, make_tokenizer, are_right)


def test_large_mixed_and_ordered_data_sets_are_streamed(folder: str) -> None:
    assert not is_streamed(DataConfig(train=[folder]))
    assert not is_streamed(DataConfig(train=[folder], stream_above=61))
    assert is_streamed(DataConfig(train=[folder], stream_above=59))
    assert is_streamed(DataConfig(train=[folder], stream_above=0))
    assert is_streamed(DataConfig(sources=[SourceConfig(folder)]))
    assert is_streamed(DataConfig(train=[folder], curriculum=CurriculumConfig(solved=0.5)))
    stages = [StageConfig(most=1)]
    by_difficulty = CurriculumConfig(column="extra_info.difficulty", stages=stages)
    assert is_streamed(DataConfig(train=[folder], curriculum=by_difficulty))


def test_several_paths_are_one_data_set(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        stream = open_here(DataConfig(train=[f"{folder}/0.parquet", f"{folder}/more"], workers=0))
    assert sorted(p.index for p in stream.take(40)) == list(range(40))
    assert "40 rows of 2 files" in caplog.text
    stream.close()


def test_workers_tokenize_as_the_controller_does(folder: str, tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    make = partial(load_tokenizer, str(tmp_path / "tokenizer"), "model.path")
    drawn = []
    for workers in (0, 2):
        config = DataConfig(train=[folder], workers=workers, lookahead=100)
        stream = open_prompts(config, 0, make, are_right)
        drawn.append(stream.take(150))
        stream.close()
    assert drawn[0] == drawn[1]


def test_sources_are_mixed_and_each_has_an_order_of_its_own(folder: str) -> None:
    sources = [SourceConfig(folder, 2.0), SourceConfig(folder, 1.0)]
    stream = open_here(DataConfig(sources=sources, workers=0))
    prompts = stream.take(90)
    orders = [numbers_of([p for p in prompts if p.index // 60 == i]) for i in (0, 1)]
    assert [len(numbers) for numbers in orders] == [60, 30]
    assert orders[0][:30] != orders[1]
    stream.close()


def test_a_curriculum_and_the_order_of_files_reach_the_stream(folder: str) -> None:
    stages = [StageConfig(most=0.5)]
    easy = CurriculumConfig(column="extra_info.difficulty", stages=stages)
    config = DataConfig(train=[f"{folder}/*.parquet"], workers=0, shuffle=False, curriculum=easy)
    stream = open_here(config)
    assert numbers_of(stream.take(12)) == [*range(6), *range(6)]
    stream.close()


def test_a_source_that_cannot_be_used_is_named(folder: str) -> None:
    config = DataConfig(sources=[SourceConfig(folder), SourceConfig("none.parquet")])
    with pytest.raises(ValueError, match=r"data file none.parquet does not exist"):
        open_here(config)
    hardness = CurriculumConfig(column="level", stages=[StageConfig(most=0.5)])
    with pytest.raises(ValueError, match=r"lacks `level` \(data.curriculum.column\); it has "):
        open_here(DataConfig(sources=[SourceConfig(folder)], curriculum=hardness))


@pytest.mark.parametrize("number", range(3))
def test_the_examples_of_the_document_draw_prompts(number: int, tmp_path: Path) -> None:
    """As written, with folders of a few rows in place of theirs."""
    text = (ROOT / "docs" / "data.md").read_text()
    examples = re.findall(r"```yaml\n# recipe\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 3
    for name in ("math", "code", "prompts"):
        write_rows(tmp_path / name, [40], "jsonl" if name == "code" else "parquet")
    write_rows(tmp_path, [40])
    (tmp_path / "0.parquet").rename(tmp_path / "logic.parquet")
    recipe = tmp_path / "mine.yaml"
    example = examples[number].replace("/data/", f"{tmp_path}/")
    recipe.write_text(f"# mine\ndefaults: [schema, _self_]\n{example}")
    config = load_recipe(str(recipe), ["data.workers=0", "data.stream_above=0"]).data
    assert is_streamed(config)
    stream = open_here(config)
    prompts = stream.take(20)
    if config.sources:
        assert [sum(p.index // 40 == i for p in prompts) for i in range(3)] == [10, 6, 4]
    if config.curriculum.is_used:
        assert max(numbers_of(prompts)) <= 3
    stream.close()

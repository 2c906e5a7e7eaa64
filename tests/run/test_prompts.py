"""Prompts of a run: loaded whole or streamed; the first are for the parity check or for pairs."""

from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rl.config import (
    AdapterConfig,
    Config,
    DataConfig,
    EvalConfig,
    EvalSetConfig,
    LoraConfig,
    ModelConfig,
    SourceConfig,
    TrainConfig,
)
from mcore_rl.data.source import ShuffledStream
from mcore_rl.data.streamed.mixed import MixedPrompts
from mcore_rl.run.prompts import PromptReader, set_steps
from mcore_rl.run.roles.turns import TurnPrompts
from mcore_rl.tasks.arithmetic import make_tokenizer
from tests.support.prompt_sets import write_rows


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A recipe whose prompts, 50 rows in two files, are loaded whole."""
    make_tokenizer().save_pretrained(tmp_path / "model")
    write_rows(tmp_path / "set", [30, 20], long_rows=[4])
    data = DataConfig(
        train=[str(tmp_path / "set")], max_prompt_len=64, cache_dir=str(tmp_path), workers=0
    )
    return Config(model=ModelConfig(str(tmp_path / "model")), data=data)


def reader_of(config: Config) -> PromptReader:
    return PromptReader.make(config, make_tokenizer())


def make_streaming_reader(config: Config) -> PromptReader:
    return reader_of(replace(config, data=replace(config.data, stream_above=10)))


def test_few_prompts_are_loaded_whole_and_many_are_streamed(config: Config) -> None:
    whole = reader_of(config).open_train(num_first=3)
    many = make_streaming_reader(config).open_train(num_first=3)
    assert isinstance(whole.stream, ShuffledStream) and isinstance(many.stream, MixedPrompts)
    assert len(whole.first) == 49 and len(many.first) == 3
    epochs = [sorted(s.take(49), key=lambda p: p.index) for s in (whole.stream, many.stream)]
    assert epochs[0] == epochs[1]
    for prompts in (whole, many):
        prompts.stream.close()


def test_pairs_are_made_of_a_number_of_prompts(config: Config) -> None:
    reader = reader_of(config)
    assert len(reader.take_first(0)) == 49
    assert [p.index for p in reader.take_first(5)] == [0, 1, 2, 3, 5]
    assert len(make_streaming_reader(config).take_first(20)) == 20
    with pytest.raises(ValueError, match=r"dpo.prompts=0 asks for all prompts, but they are str"):
        make_streaming_reader(config).take_first(0)


def test_held_out_prompts_may_be_a_folder_or_none(config: Config) -> None:
    reader = reader_of(config)
    assert len(reader.load(config.data.train)) == 49
    assert reader.load_held_out() == []
    with pytest.raises(ValueError, match=r"data file none.jsonl does not exist"):
        reader.load(["none.jsonl"])


def test_sets_of_held_out_prompts_are_named_and_bounded_each(config: Config) -> None:
    [first, second] = sorted(Path(config.data.train[0]).iterdir())
    sets = [EvalSetConfig("a", str(first)), EvalSetConfig("b", str(second))]
    evaluation = EvalConfig(data=[str(second)], sets=sets, max_prompts=15)
    prompts = reader_of(replace(config, eval=evaluation)).load_held_out()
    assert [prompt.set_name for prompt in prompts] == [""] * 15 + ["a"] * 15 + ["b"] * 15
    assert [prompt.index for prompt in prompts] == [*range(45)]
    assert [p.token_ids for p in prompts[30:]] == [p.token_ids for p in prompts[:15]]
    assert {prompt.adapter for prompt in prompts} == {""}


def test_the_weights_below_factors_answer_the_sets_that_ask_them(config: Config) -> None:
    [first, second] = map(str, sorted(Path(config.data.train[0]).iterdir()))
    sets = [EvalSetConfig("a", first), EvalSetConfig("below", first, model="base")]
    lora = LoraConfig(rank=4, sync="adapter", targets=["q_proj"])
    asked = {"eval": EvalConfig(data=[second], sets=sets, max_prompts=3)}
    own = replace(config, **asked, train=TrainConfig(lora=lora))
    held_out = reader_of(own).load_held_out()
    assert [prompt.adapter for prompt in held_out] == [""] * 6 + ["base"] * 3
    assert [p.token_ids for p in held_out[3:6]] == [p.token_ids for p in held_out[6:]]
    for wrong in (LoraConfig(), replace(lora, sync="merged")):
        with pytest.raises(ValueError, match=r"eval.sets: below has model=base .*sync=adapter"):
            replace(config, **asked, train=TrainConfig(lora=wrong))


def test_each_adapter_has_prompts_of_its_own(config: Config) -> None:
    [folder] = config.data.train
    files = sorted(map(str, Path(folder).iterdir()))
    adapters = [
        AdapterConfig("ada", [files[0]], eval=[files[1]]),
        AdapterConfig("bob", [files[1]], rank=2),
    ]
    lora = LoraConfig(rank=4, sync="adapter", adapters=adapters)
    own = replace(config, data=replace(config.data, train=[]), train=TrainConfig(lora=lora))
    reader = reader_of(own)
    stream = reader.open_train(num_first=3).stream
    assert isinstance(stream, TurnPrompts) and stream.get_place().rows == (29, 20)
    for name in ("ada", "bob"):
        stream.choose(name)
        assert {prompt.adapter for prompt in stream.take(3)} == {name}
    held_out = reader.load_held_out()
    assert len(held_out) == 20
    assert {(prompt.set_name, prompt.adapter) for prompt in held_out} == {("ada", "ada")}


def test_a_missing_source_is_named(config: Config) -> None:
    missing = replace(config, data=DataConfig(sources=[SourceConfig("none/*.parquet")]))
    with pytest.raises(ValueError, match=r"data files none/\*.parquet: the pattern matches no"):
        reader_of(missing).open_train(3)


@pytest.mark.parametrize(
    ("epochs", "prompts_per_step", "steps"), [(1.0, 10, 5), (3.0, 16, 9), (0.5, 8, 3), (0.1, 32, 1)]
)
def test_epochs_are_steps_over_the_rows_of_the_files(
    config: Config, epochs: float, prompts_per_step: int, steps: int
) -> None:
    config.run.epochs = epochs
    config.rollout.prompts_per_step = prompts_per_step
    assert set_steps(config).run.steps == steps
    assert set_steps(config).run.epochs is None, "which later calls leave as it is"
    assert config.run.steps == 100


def test_blank_lines_are_no_prompts(config: Config, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n{"a": 3}')
    config.data.train = [str(tmp_path / "a.jsonl")]
    config.run.epochs = 2.0
    config.rollout.prompts_per_step = 1
    assert set_steps(config).run.steps == 6


def test_epochs_of_data_sets_that_are_mixed_are_refused(config: Config) -> None:
    sources = [SourceConfig("a"), SourceConfig("b")]
    with pytest.raises(ValueError, match=r"run.epochs=2 with 2 data.sources: each is passed over"):
        replace(
            config, run=replace(config.run, epochs=2.0), data=DataConfig(train=[], sources=sources)
        )

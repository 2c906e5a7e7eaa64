"""Episodes that cannot be played are refused before a run, and the template's ways are logged."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config import AgentsConfig, Config, DataConfig, ModelConfig, RolloutConfig, RunConfig
from mcore_rl.run.episodes import check_episodes, episode_spec, stop_token_ids
from mcore_rl.tasks.tiny_models import qwen3_moe_config
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.workers.episodes import EpisodeSpec
from tests.agents.environments import episodes
from tests.support.chat_templates import make_tokenizer, stop_ids

COUNTDOWN = f"{episodes.HERE}:Countdown"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with the configuration and the tokenizer of a Qwen3 MoE."""
    folder = tmp_path / "model"
    make_tokenizer("qwen3").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(qwen3_moe_config(400)))
    return folder


def make_config(model: Path, **agents: Any) -> Config:
    return Config(
        run=RunConfig(dir=str(model.parent / "run")),
        model=ModelConfig(path=str(model)),
        data=DataConfig(max_prompt_len=30),
        rollout=RolloutConfig(max_response_len=50),
        agents=AgentsConfig(**{"environment": COUNTDOWN, **agents}),
    )


def spec_of(config: Config, policy: ModelFacts, tokenizer: Any) -> EpisodeSpec:
    max_len, run_dir = config.rollout.max_response_len, config.run.dir
    facts = policy, tokenizer
    return episode_spec(config.agents, config.model, config.data, max_len, run_dir, *facts)


def check(config: Config) -> None:
    tokenizer = make_tokenizer("qwen3")
    spec = spec_of(config, ModelFacts.read(config.model.path), tokenizer)
    check_episodes(spec, tokenizer, config.teacher, {})


def test_rows_hold_the_prompt_and_what_follows(model: Path) -> None:
    policy = ModelFacts.read(model)
    spec = spec_of(make_config(model, max_turn_len=9), policy, make_tokenizer("qwen3"))
    assert (spec.max_tokens, spec.max_turn_len) == (80, 9)
    assert spec_of(make_config(model), policy, make_tokenizer("qwen3")).max_turn_len == 50
    assert spec.architecture == "Qwen3MoeForCausalLM"


def test_episodes_of_kimi_vl_know_the_placeholder_of_images(model: Path) -> None:
    policy = ModelFacts.read("recipes/model/kimi_vl_a3b")
    spec = spec_of(make_config(model), policy, make_tokenizer("qwen3"))
    assert (spec.placeholder_id, spec.image_marks) == (163605, (163605,))


def test_engines_stop_at_what_the_files_of_a_model_name(model: Path) -> None:
    tokenizer = make_tokenizer("qwen3")
    first, second = stop_ids("qwen3")[:2]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [first, second]}))
    assert set(stop_token_ids(tokenizer, model)) >= {first, second}


def test_the_ways_of_the_template_are_logged(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    check(make_config(model))
    assert "chat template: " in caplog.text and "new row" in caplog.text


@pytest.mark.parametrize(
    ("agents", "message"),
    [
        ({"environment": "chess"}, "there is no environment of kind 'chess'"),
        ({"options": {"speed": 3}}, "does not read the options speed"),
        ({"python": "/no/such/python"}, "cannot be started"),
        ({"environment": "gymnasium"}, "needs the options id"),
    ],
)
def test_what_cannot_be_played_is_refused(
    model: Path, agents: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check(make_config(model, **agents))

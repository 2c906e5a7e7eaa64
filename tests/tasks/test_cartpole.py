"""Starts of CartPole: none is both trained on and held out, and the model knows every word."""

from pathlib import Path

import pyarrow.parquet as pq
import yaml
from transformers import AutoTokenizer

from mcore_rl.agents.environments.gymnasium_env import GymnasiumOptions
from mcore_rl.tasks.cartpole import ACTIONS, LABELS, prepare_cartpole, vocabulary
from tests.support.policy import ROOT


def seeds(path: Path) -> set[int]:
    return {row["extra_info"]["seed"] for row in pq.read_table(path).to_pylist()}


def test_no_held_out_start_is_trained_on(tmp_path: Path) -> None:
    prepare_cartpole(tmp_path)
    held_out = seeds(tmp_path / "heldout.parquet")
    train = seeds(tmp_path / "train.parquet")
    assert len(held_out) == 20 and len(train) == 2000 and not held_out & train


def test_the_model_has_a_token_for_each_word_of_the_recipes_observations(tmp_path: Path) -> None:
    recipe = yaml.safe_load((ROOT / "recipes/tiny_agent_cartpole.yaml").read_text())
    options = GymnasiumOptions(**recipe["agents"]["options"])
    assert list(options.labels) == list(LABELS) and list(options.actions) == list(ACTIONS)
    prepare_cartpole(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for values in ([9.0] * 4, [-9.0] * 4, [0.005] * 4):
        ids = tokenizer.encode(options.bucket_text(values))
        assert len(ids) == 4 and tokenizer.pad_token_id not in ids
    assert [len(tokenizer.encode(action)) for action in ACTIONS] == [1, 1]
    assert len(vocabulary()) == len(set(vocabulary()))

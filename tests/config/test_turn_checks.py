"""Options that do not go together with several adapters in turns are refused by name."""

from typing import Any

import pytest

from mcore_rl.config import AdapterConfig, Config, LoraConfig, SourceConfig
from mcore_rl.config.tree import with_settings

ADAPTERS = [AdapterConfig("ada", ["a.jsonl"]), AdapterConfig("bob", ["b.jsonl"], rank=4, alpha=2.0)]
ON = {"train.lora.rank": 8, "train.lora.sync": "adapter", "train.lora.adapters": ADAPTERS}


def test_adapters_have_the_options_that_they_do_not_set_from_the_group() -> None:
    lora = with_settings(Config(), ON).train.lora
    both = lora.list_adapters()
    assert {name: (own.rank, own.alpha, own.name) for name, own in both.items()} == {
        "ada": (8, 32.0, "ada"),
        "bob": (4, 2.0, "bob"),
    }
    assert (lora.total_rank, lora.most_rank) == (12, 8)
    one = LoraConfig(rank=8)
    assert one.list_adapters() == {"": one} and one.total_rank == one.most_rank == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train.lora.rank": 0}, "train.lora.sync=adapter with train.lora.rank=0|adapters"),
        ({"train.lora.sync": "merged"}, "train.lora.sync=merged with 2 train.lora.adapters"),
        ({"train.lora.sync": "auto"}, "train.lora.sync=auto with 2 train.lora.adapters"),
        ({"train.lora.path": "p"}, "train.lora.path=p with 2 train.lora.adapters"),
        ({"train.lora.name": "p"}, "train.lora.name=p with 2 train.lora.adapters"),
        ({"run.steps": 5}, "run.steps=5 with 2 train.lora.adapters, which take turns"),
        ({"run.epochs": 1.0}, "run.epochs=1.0 with 2 train.lora.adapters"),
        ({"data.train": ["t"]}, "data.train=.* each adapter has prompts of its own; set train.l"),
        ({"data.sources": [SourceConfig("s")]}, "data.sources=.* with 2 train.lora.adapters"),
        ({"data.curriculum.solved": 0.5}, "drawn without a curriculum"),
        ({"eval.data": ["t"]}, r"eval.data=.* set train.lora.adapters\[...\].eval"),
        (
            {"rollout.mode": "one_step_off", "algorithm.correction.weight": "token"},
            "rollout.mode=one_step_off with 2 train.lora.adapters",
        ),
        ({"agents.environment": "calculator"}, "agents.environment=calculator with 2 train"),
        ({"algorithm.advantage": "gae"}, "algorithm.advantage=gae with 2 train.lora.adapters"),
        ({"checkpoint.hub_repo": "a/b"}, "checkpoint.hub_repo=a/b with 2 train.lora.adapters"),
    ],
)
def test_options_that_contradict_turns_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_settings(Config(), ON | settings)


@pytest.mark.parametrize("name", ["", "base", "a b", "ada"])
def test_each_adapter_needs_a_name_of_its_own(name: str) -> None:
    adapters = [*ADAPTERS, AdapterConfig(name, ["c.jsonl"])]
    with pytest.raises(ValueError, match=rf"train\.lora\.adapters\[2\]\.name='{name}': give each"):
        with_settings(Config(), ON | {"train.lora.adapters": adapters, "run.steps": 3})

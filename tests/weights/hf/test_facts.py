"""Facts about a model directory: each equals what the family's table or config.json says."""

from pathlib import Path

import pytest

from mcore_rl.weights.hf.config import ModelFacts, read_hf_config
from mcore_rl.weights.models import family_of

MODELS = sorted(Path("recipes/model").glob("*/config.json"))


@pytest.mark.parametrize("file", MODELS, ids=lambda file: file.parent.name)
def test_facts_of_published_models_agree_with_config_and_family(file: Path) -> None:
    facts = ModelFacts.read(file.parent)
    config = read_hf_config(file.parent)
    family = family_of(config)
    assert facts.path == file.parent
    assert facts.config == config
    assert facts.family is family
    assert facts.architecture == family.architecture
    assert facts.sizes == family.sizes(config)
    assert facts.vocab_size == config["vocab_size"]
    assert len(facts.moe_layers) == config["num_hidden_layers"]
    assert facts.max_position_embeddings == config["max_position_embeddings"]
    assert facts.has_experts == (facts.num_experts > 0)
    assert not facts.has_value_head
    assert facts.has_tower == ("vision_config" in config)


def test_facts_of_deepseek_v3() -> None:
    facts = ModelFacts.read("recipes/model/deepseek_v3")
    assert facts.moe_layers == (False,) * 3 + (True,) * 58
    assert facts.num_experts == 256
    assert facts.experts_per_token == 8
    assert not facts.stacks_experts


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json does not exist"):
        ModelFacts.read(tmp_path)

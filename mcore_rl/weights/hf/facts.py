"""Reads a model's config.json once and offers what it says as typed facts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.weights.hf.config import moe_layers, read_hf_config
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.table import Family, HfConfig
from mcore_rl.weights.models.value_head import has_value_head


@dataclass(frozen=True)
class ModelFacts:
    """A supported model as its config.json describes it.

    A command makes one of these per model directory when it starts and passes it on, so that no
    later step opens the file again. A process on another host reads its own.

    path     HuggingFace directory
    config   the parsed config.json
    """

    path: Path
    config: HfConfig

    @staticmethod
    def read(hf_dir: str | Path) -> "ModelFacts":
        """Raises ValueError naming config.json and the setting if the model is not supported."""
        return ModelFacts(Path(hf_dir), read_hf_config(hf_dir))

    @property
    def architecture(self) -> str:
        """The first name under `architectures`."""
        return self.config["architectures"][0]

    @property
    def family(self) -> Family:
        return family_of(self.config)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Axis sizes by the names that the family's table uses."""
        return self.family.sizes(self.config)

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, without padding."""
        return self.config["vocab_size"]

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence, in tokens."""
        return self.config["max_position_embeddings"]

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """Tell for each layer whether it has experts."""
        return tuple(map(bool, moe_layers(self.config)))

    @property
    def has_experts(self) -> bool:
        return any(self.moe_layers)

    @property
    def num_experts(self) -> int:
        """Routed experts of each layer that has any; 0 for a dense model."""
        return self.sizes["experts"]

    @property
    def experts_per_token(self) -> int:
        return self.config["num_experts_per_tok"]

    @property
    def stacks_experts(self) -> bool:
        """Return whether one HF tensor holds all experts of a layer."""
        return self.family.stacks_experts

    @property
    def has_tower(self) -> bool:
        """Return whether the model sees images."""
        return self.family.has_tower

    @property
    def has_value_head(self) -> bool:
        """Return whether the model gives one value per token instead of log-probs."""
        return has_value_head(self.config)

"""Reads the config.json of a HuggingFace model directory and refuses unsupported models.

Commands read it once, as `ModelFacts`, and pass that on. A vision-language model is read as if the
language model stood alone in it:

    config.json                                        in memory
    {"text_config": {"hidden_size": 64, ...},    ->    {"hidden_size": 64, ...,
     "vision_config": {...}, ...}                       "text_config": {...}, "vision_config": ...}

transformers 5 nests the language model's settings, the published files have them at the top.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from typing import Any

from mcore_rl.config.shipped import describe_making
from mcore_rl.process.file_list import read_json
from mcore_rl.weights.hf.int4 import TEXT
from mcore_rl.weights.hf.packing import Packing, find_packing
from mcore_rl.weights.models import family_of, refuse_unsupported
from mcore_rl.weights.models.mtp import TRAINED
from mcore_rl.weights.models.settings import drop_quantization
from mcore_rl.weights.models.table import Family, HfConfig
from mcore_rl.weights.models.value_head import has_value_head

OWN = frozenset({"architectures", "model_type", "dtype", "torch_dtype", "tie_word_embeddings"})
"""Settings that the whole model has at the top of config.json, whatever its parts say."""


def with_text_settings(config: HfConfig) -> dict[str, Any]:
    """Return config.json with the settings of its `text_config`, if any, at the top as well.

    A setting that stands at the top keeps its value.
    """
    return {**(config.get(TEXT) or {}), **config}


def without_text_settings(config: HfConfig) -> dict[str, Any]:
    """Return the config.json to write: settings that `text_config` repeats are in it alone."""
    text = config.get(TEXT) or {}
    return {
        key: value
        for key, value in config.items()
        if key in OWN or key not in text or text[key] != value
    }


DTYPE_KEYS = frozenset({"dtype", "torch_dtype"})
MTP = "num_nextn_predict_layers"
VOCAB_MULTIPLE = 128
"""The embedding is padded to a multiple of so many rows."""


def read_hf_config(hf_dir: str | Path) -> dict[str, Any]:
    """Return the parsed config.json of a supported model, with its text_config at the top.

    Weights in INT4 and block FP8 are read as the plain weights that they encode, so config.json is
    that of the plain model. Raises ValueError naming the file and the setting if the model is not
    supported.
    """
    config = with_text_settings(parse_hf_config(hf_dir))
    if find_packing(config) != "plain":
        config = drop_quantization(config)
    config = family_of(config).complete(config)
    refuse_unsupported(config, Path(hf_dir) / "config.json")
    return config


def parse_hf_config(hf_dir: str | Path) -> dict[str, Any]:
    """Return the parsed config.json of any model, supported or not.

    Raises ValueError naming the file if it is missing or is not a JSON object.
    """
    path = Path(hf_dir) / "config.json"
    if not path.is_file():
        remedy = describe_making(hf_dir) or describe_download(hf_dir) or _describe_near(path.parent)
        raise ValueError(
            f"{path} does not exist: {hf_dir} is not a HuggingFace model directory{remedy}"
        )
    try:
        config = read_json(path)
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object: it is damaged")
    return config


def describe_download(path: str | Path) -> str:
    """Return "; ..." with the command that downloads a model if `path` may be a name of the hub."""
    if Path(path).exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(path)):
        return ""
    return f"; to download a model of the hub: hf download {path} --local-dir <directory>"


def _describe_near(folder: Path) -> str:
    """Return "; ..." with the model of a run's folder or of a checkpoint, if `folder` is one."""
    if (folder / "hf" / "config.json").is_file():
        return f"; {folder / 'hf'} is one"
    if (folder / ".metadata").is_file():
        return "; `mcore-rl-ckpt to-hf` makes one of a checkpoint"
    return ""


def read_named_dtype(config: HfConfig) -> str | None:
    """Return the torch name of the model's dtype, None if config.json gives none.

    The key is `dtype`, in older files `torch_dtype`.
    """
    return config.get("dtype") or config.get("torch_dtype")


def set_dtype(config: HfConfig, dtype: str) -> dict[str, Any]:
    """Return config.json of the same model in another dtype.

    The older key, torch_dtype, and the dtypes of its parts say the same, where they are given.
    """
    settings: dict[str, Any] = {**config, "dtype": dtype}
    for key, value in config.items():
        if isinstance(value, Mapping) and key.endswith("_config") and DTYPE_KEYS & value.keys():
            settings[key] = {**value, **dict.fromkeys(DTYPE_KEYS & value.keys(), dtype)}
    if "torch_dtype" in settings:
        settings["torch_dtype"] = dtype
    return settings


def drop_absent_mtp(config: HfConfig, names: Collection[str]) -> dict[str, Any]:
    """Return config.json without multi-token-prediction layers if none of their tensors is there.

    names   HF names of the tensors that are written
    Says so, as engines would look for these layers.
    """
    settings = dict(config)
    first, count = config.get("num_hidden_layers"), config.get(MTP)
    if not isinstance(first, int) or not isinstance(count, int) or not count:
        return settings
    layers = "|".join(map(str, range(first, first + count)))
    pattern = re.compile(rf"(.*\.)?(layers\.({layers})|mtp|nextn)\..*")
    if not any(pattern.fullmatch(name) for name in names):
        print(
            f"config.json names {config[MTP]} layers that predict further tokens, and the source"
            f" has no weights of them: the result says {MTP}=0"
        )
        settings[MTP] = 0
        if isinstance(settings.get(TEXT), Mapping) and MTP in settings[TEXT]:
            settings[TEXT] = {**settings[TEXT], MTP: 0}
    return settings


def with_trained_mtp(config: HfConfig) -> dict[str, Any]:
    """Return the config in memory of the same model with its layers for multi-token prediction.

    Raises ValueError naming the architecture if it has none, or none that can be trained.
    """
    if problem := find_mtp_problem(config):
        raise ValueError(f"{(config.get('architectures') or ['the model'])[0]} {problem}")
    return {**config, TRAINED: family_of(config).mtp_layers(config)}


def choose_trained(config: HfConfig, mtp_loss: float) -> HfConfig:
    """Return the config in memory of what a policy with this train.mtp_loss trains.

    Raises ValueError as with_trained_mtp does.
    """
    return with_trained_mtp(config) if mtp_loss else config


def without_trained_mtp(config: HfConfig) -> dict[str, Any]:
    """Return the config as files have it."""
    return {key: value for key, value in config.items() if key != TRAINED}


def find_mtp_problem(config: HfConfig) -> str:
    """Return why the model's layers for multi-token prediction cannot be trained; "" if they can.

    Each has the modules of the model's last layer, as in megatron-core.
    """
    family = family_of(config)
    if not family.trains_mtp:
        return "has no layers for multi-token prediction that can be trained"
    count = family.mtp_layers(config)
    if not count:
        return (
            f"has no layers for multi-token prediction: config.json has no {MTP} or"
            " mtp_num_hidden_layers above 0"
        )
    if count > 1 and not all(rule.goes_on for rule in family.rules if rule.where == "mtp"):
        return f"has {count} layers for multi-token prediction, which share a projection"
    kinds = family.list_kinds(config, config["num_hidden_layers"] - 1)
    mtp_has_experts = any(r.has_expert_axis for r in family.rules if r.where == "mtp")
    if mtp_has_experts != ("moe" in kinds) or "softmax" not in kinds:
        return "ends with a layer of another kind than that for multi-token prediction"
    return ""


def pad_vocab_size(config: HfConfig, tp: int) -> int:
    """Return the rows of the embedding in memory, padding included.

    The number is the same for every `tp` that divides VOCAB_MULTIPLE, so that checkpoints reshard.
    """
    multiple = lcm(VOCAB_MULTIPLE, tp)
    return -(-config["vocab_size"] // multiple) * multiple


def moe_layers(config: HfConfig) -> list[int]:
    """Return 1 for each layer with experts and 0 for each dense layer, in order."""
    family = family_of(config)
    return [int(family.is_moe_layer(config, i)) for i in range(config["num_hidden_layers"])]


def linear_layers(config: HfConfig) -> list[int]:
    """Return 1 for each layer with linear attention and 0 for each other, in order."""
    family = family_of(config)
    return [int(family.is_linear(config, i)) for i in range(config["num_hidden_layers"])]


@dataclass(frozen=True)
class ModelFacts:
    """A supported model as its config.json describes it.

    A command makes one of these per model directory when it starts and passes it on, so that no
    later step opens the file again. A process on another host reads its own.

    path      HuggingFace directory
    config    the parsed config.json, without quantization
    packing   how the files have matrices in few bits, if they do (packing.py)
    """

    path: Path
    config: HfConfig
    packing: Packing = "plain"

    @staticmethod
    def read(hf_dir: str | Path) -> "ModelFacts":
        """Raises ValueError naming config.json and the setting if the model is not supported."""
        packing = find_packing(parse_hf_config(hf_dir))
        return ModelFacts(Path(hf_dir), read_hf_config(hf_dir), packing)

    def choose_trained(self, mtp_loss: float) -> "ModelFacts":
        """Return the facts of what a policy with this train.mtp_loss trains."""
        return replace(self, config=choose_trained(self.config, mtp_loss))

    @property
    def is_packed(self) -> bool:
        """Whether the files have matrices in few bits, which ranks decode as they read them."""
        return self.packing != "plain"

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
    def has_gated_experts(self) -> bool:
        """Return whether the model has routed experts, and each a gate."""
        gates = (".experts.{expert}.gate_proj.weight", ".experts.{expert}.w1.weight")
        names = (tensor.name for rule in self.family.rules for tensor in rule.tensors)
        return self.has_experts and any(name.endswith(gates) for name in names)

    @property
    def has_tower(self) -> bool:
        """Return whether the model sees images."""
        return self.family.has_tower

    @property
    def has_value_head(self) -> bool:
        """Return whether the model gives one value per token instead of log-probs."""
        return has_value_head(self.config)

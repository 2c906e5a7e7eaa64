"""The facts that make factors an adapter: scale, targets and base; a checkpoint has them beside it.

    checkpoint of a run with LoRA:  lora.<HF tensor>.A, lora.<HF tensor>.B, optimizer, lora.json
    with several adapters:          lora.<adapter>.<HF tensor>.A, ...,      optimizer, lora.json

Factors that lack these facts fit other models and other scales without an error.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcore_rl.config import CriticLoraConfig, LoraConfig
from mcore_rl.process.file_list import read_json
from mcore_rl.weights.lora.places import AdapterStamp, list_factor_shapes
from mcore_rl.weights.lora.targets import list_targets, name_modules
from mcore_rl.weights.models import hf_tensor_shapes
from mcore_rl.weights.models.table import HfConfig, Shape

FACTS = "lora.json"
"""File of a checkpoint that holds factors."""
FACTORS = "lora."
"""Begins the names of factors in a model, and their keys in a checkpoint."""
_SEVERAL = "adapters"
"""Key of the file in which each of several adapters has facts by its name."""
_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "rank": int,
    "alpha": (int, float),
    "rslora": bool,
    "experts": bool,
    "base": str,
    "base_path": str,
}


def sends_factors(lora: LoraConfig, stages_weights: bool) -> bool:
    """Return whether engines get factors and merge them.

    stages_weights   rollout.stage_weights
    """
    wanted = lora.sync == "factors" or (lora.sync == "auto" and stages_weights)
    return bool(lora.rank) and wanted


def serves_adapter(lora: LoraConfig) -> bool:
    """Return whether engines serve the factors as an adapter beside the weights."""
    return bool(lora.rank) and lora.sync == "adapter"


@dataclass(frozen=True)
class AdapterFacts:
    """Whose factors they are, and how they are added.

    targets     names of the adapted modules, sorted; none is left to a default
    base        checksum of the weights that they are added to (base.py)
    base_path   the directory that had these weights, for messages
    """

    rank: int
    alpha: float
    rslora: bool
    targets: tuple[str, ...]
    experts: bool
    base: str
    base_path: str

    @staticmethod
    def make(
        config: LoraConfig | CriticLoraConfig, hf_config: HfConfig, base: str, base_path: str
    ) -> "AdapterFacts":
        """Return the facts of a recipe's adapter. Raises ValueError as `list_targets` does."""
        names = list_targets(hf_config, config.targets, config.experts)
        targets = config.targets or name_modules(hf_config)
        return AdapterFacts(
            config.rank,
            float(config.alpha),
            config.rslora,
            tuple(sorted(set(targets))),
            any(is_of_expert(name) for name in names),
            base,
            base_path,
        )

    @property
    def scale(self) -> float:
        """The number that the product B A is multiplied by."""
        return compute_scale(self.rank, self.alpha, self.rslora)

    def list_factor_shapes(self, hf_config: HfConfig) -> dict[str, Shape]:
        """Return the shape of each factor, by "<HF tensor>.A" and "<HF tensor>.B"."""
        shapes = hf_tensor_shapes(hf_config)
        names = list_targets(hf_config, self.targets, self.experts)
        return list_factor_shapes({name: shapes[name] for name in names}, self.rank)

    def make_stamp(self, hf_config: HfConfig) -> AdapterStamp:
        """Return what each version of the factors carries to engines."""
        num_matrices = len(list_targets(hf_config, self.targets, self.experts))
        return AdapterStamp(self.rank, self.scale, num_matrices, self.base)


def encode_adapters(adapters: Mapping[str, AdapterFacts]) -> str:
    """Return the content of lora.json; the name of an only adapter is ""."""
    content: dict[str, Any] = {_SEVERAL: {name: asdict(own) for name, own in adapters.items()}}
    if "" in adapters:
        content = asdict(adapters[""])
    return json.dumps(content, indent=2) + "\n"


def compute_scale(rank: int, alpha: float, rslora: bool) -> float:
    return alpha / (math.sqrt(rank) if rslora else rank)


def spell_key(key: str) -> str:
    """Return PEFT's name of the factor "<HF tensor>.A"."""
    name, letter = key[:-2], key[-1]
    return f"base_model.model.{name.removesuffix('.weight')}.lora_{letter}.weight"


def is_of_expert(name: str) -> bool:
    """Return whether an HF tensor belongs to one routed expert."""
    return ".experts." in name


def read_adapters(folder: Path) -> dict[str, AdapterFacts]:
    """Return what a checkpoint's lora.json says of each adapter; {}: it holds all weights.

    The name of an only adapter is "". Raises ValueError naming the file if it is damaged.
    """
    path = folder / FACTS
    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = read_json(path)
        adapters = content.get(_SEVERAL, {"": content})
        return {name: _decode_facts(own) for name, own in adapters.items()}
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error


def _decode_facts(content: Mapping[str, Any]) -> AdapterFacts:
    facts = AdapterFacts(**{**content, "targets": tuple(content["targets"])})
    for name, kind in _KINDS.items():
        if not isinstance(getattr(facts, name), kind):
            raise ValueError(f"{name} is {getattr(facts, name)!r}")
    return facts


@dataclass(frozen=True)
class AdapterOptions:
    """Names, for messages, of the options of a model's factors and of its weights.

    export   folder of the exported weights in the run's folder
    """

    group: str
    path: str
    export: str


OF_POLICY = AdapterOptions("train.lora", "model.path", "hf")
OF_CRITIC = AdapterOptions("critic.lora", "critic.path", "critic_hf")


def refuse_other_adapters(
    folder: Path,
    own: Mapping[str, AdapterFacts],
    here: Path | None = None,
    options: AdapterOptions = OF_POLICY,
) -> None:
    """Raise ValueError unless a checkpoint holds what a run trains: all weights, or its adapters.

    own    the run's adapters by name, "" being the name of an only one; {}: it trains all weights
    here   local copy of `folder` that is read
    """
    rank = f"{options.group}.rank"
    saved = read_adapters(here or folder)
    if not saved and own:
        raise ValueError(
            f"{folder} holds all weights of a model, and {rank}={_largest(own)} trains factors"
            f" alone: set {rank}=0, or start another run.dir from the exported weights"
            f" ({options.path}=<run.dir>/{options.export})"
        )
    if saved and not own:
        raise ValueError(
            f"{folder} holds factors of rank {_largest(saved)} and no weights, and {rank}=0 trains"
            f" all weights: set {rank}={_largest(saved)}, or start another run.dir from the merged"
            " weights (mcore-rl-ckpt merge-lora)"
        )
    if saved.keys() != own.keys():
        raise ValueError(
            f"{folder} holds {_name_all(saved)}, and this run trains {_name_all(own)}: name the"
            f" same ones in {options.group}.adapters, or start another run.dir"
        )
    for name, facts in own.items():
        where = f"{folder}: adapter {name}" if name else str(folder)
        _refuse_difference(where, saved[name], facts, options.group)


def _largest(adapters: Mapping[str, AdapterFacts]) -> int:
    return max(facts.rank for facts in adapters.values())


def _name_all(adapters: Mapping[str, AdapterFacts]) -> str:
    return "one adapter" if "" in adapters else f"adapters {', '.join(adapters)}"


def _refuse_difference(folder: str, saved: AdapterFacts, own: AdapterFacts, group: str) -> None:
    for name in ("rank", "alpha", "rslora", "targets", "experts"):
        value, here = (_spell(getattr(facts, name)) for facts in (saved, own))
        if value != here:
            raise ValueError(
                f"{folder} holds factors of {group}.{name}={value}, and this run has"
                f" {group}.{name}={here}: set {group}.{name}={value}, or start another run.dir"
            )
    if saved.base != own.base:
        where = f"{folder} of a run that began with {saved.base_path}"
        raise ValueError(describe_base_difference(where, saved.base, own.base, own.base_path))


def describe_base_difference(where: str, base: str, own: str, own_path: str) -> str:
    """Return what is wrong with factors of the base `base` beside weights with checksum `own`."""
    return (
        f"{where} has factors of another base: its weights have checksum {base[:16]}, and those of"
        f" {own_path} have {own[:16]}; name the directory that the factors were trained on"
    )


def _spell(value: object) -> str:
    """Return a value as a recipe has it."""
    if isinstance(value, tuple):
        return f"[{','.join(value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)

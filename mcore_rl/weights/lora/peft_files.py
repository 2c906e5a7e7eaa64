"""Reads and writes adapters in PEFT's format, which transformers loads.

    adapter_config.json          rank, alpha, scale, names of modules
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight [r, in], .lora_B.weight

<module> is the name of an HF tensor without ".weight", so each routed expert has modules of its own
(experts.3.up_proj). The checksum of the base is in the file's metadata, which PEFT ignores.
Source: peft 0.21, utils/save_and_load.py and tuners/lora/config.py.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from mcore_rl.process.disk import report_full_disk
from mcore_rl.process.file_list import read_json
from mcore_rl.weights.hf.files import save_tensors
from mcore_rl.weights.lora.facts import (
    AdapterFacts,
    compute_scale,
    describe_base_difference,
    is_of_expert,
    spell_key,
)
from mcore_rl.weights.lora.targets import list_linears, list_matrices, module_of
from mcore_rl.weights.lora.whole import check_factor_shapes
from mcore_rl.weights.models.table import HfConfig, Shape

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
BASE_SUM = "base_sha256"
"""Key of the file's metadata."""
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<letter>[AB])\.weight")
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
}
"""Fields of adapter_config.json -> values with which W = W0 + s B A holds for every module."""


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter's folder as its files describe it.

    shapes   of the factors, by "<HF tensor>.A" and "<HF tensor>.B"
    base     checksum of the base; "": PEFT wrote the files, which know none
    """

    folder: Path
    rank: int
    alpha: float
    rslora: bool
    base: str
    shapes: Mapping[str, Shape]

    @property
    def scale(self) -> float:
        return compute_scale(self.rank, self.alpha, self.rslora)

    @contextmanager
    def open(self) -> Iterator["FactorFile"]:
        """Yield the open file of the factors."""
        with safe_open(self.folder / WEIGHTS, framework="pt") as file:
            yield FactorFile(file)


class FactorFile:
    """The open file of an adapter."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, key: str) -> Tensor:
        """Return a factor by "<HF tensor>.A" or "<HF tensor>.B"."""
        return self._file.get_tensor(spell_key(key))


def is_peft(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def read_peft(folder: Path) -> PeftAdapter:
    """Read and check the files of an adapter.

    Raises ValueError naming the file and what is missing, damaged, or cannot be expressed as
    factors of matrices.
    """
    config = _read_config(folder)
    path = folder / WEIGHTS
    if not path.is_file():
        raise ValueError(f"{folder} has {CONFIG} and no {WEIGHTS}: half an adapter was copied")
    shapes: dict[str, Shape] = {}
    with safe_open(path, framework="pt") as file:
        base = (file.metadata() or {}).get(BASE_SUM, "")
        for name in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
            match = _NAME.fullmatch(name)
            if match is None:
                raise ValueError(
                    f"{path}: tensor {name!r} is no factor of a linear layer; adapt linear layers"
                    " alone"
                )
            key = f"{match['module']}.weight.{match['letter']}"
            shapes[key] = tuple(file.get_slice(name).get_shape())
    rank, alpha = config["r"], float(config["lora_alpha"])
    return PeftAdapter(folder, rank, alpha, bool(config.get("use_rslora")), base, shapes)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(
            f"{folder} has no {CONFIG}: name a folder that PEFT's save_pretrained made"
        )
    try:
        config: dict[str, Any] = read_json(path)
        for name, kind in (("r", int), ("lora_alpha", (int, float))):
            if not isinstance(config[name], kind):
                raise ValueError(f"{name} is {config[name]!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    for name, values in _PLAIN.items():
        if name in config and config[name] not in values:
            raise ValueError(
                f"{path}: {name}={config[name]!r}: only plain factors of linear layers are read,"
                f" with {name}={values[0]!r}"
            )
    return config


def check_start(
    adapter: PeftAdapter, own: AdapterFacts, hf_config: HfConfig, group: str = "train.lora"
) -> None:
    """Raise ValueError unless a run can start from an adapter, naming the option that differs.

    group   of the options of the adapter
    """
    where = f"{group}.path={adapter.folder}"
    for name in ("rank", "alpha", "rslora"):
        value, here = getattr(adapter, name), getattr(own, name)
        if value != here:
            raise ValueError(
                f"{where} has {name} {value:g}, and {group}.{name}={str(here).lower()}: set"
                f" {group}.{name}={str(value).lower()}"
            )
    check_factor_shapes(adapter.shapes, own.list_factor_shapes(hf_config), where)
    if adapter.base and adapter.base != own.base:
        raise ValueError(describe_base_difference(where, adapter.base, own.base, own.base_path))


def write_peft(
    folder: Path, facts: AdapterFacts, hf_config: HfConfig, factors: Mapping[str, Tensor]
) -> None:
    """Write an adapter's folder. `factors`: by "<HF tensor>.A" and "<HF tensor>.B"."""
    check_factor_shapes(
        {key: tuple(factor.shape) for key, factor in factors.items()},
        facts.list_factor_shapes(hf_config),
        folder,
    )
    alpha = int(facts.alpha) if facts.alpha.is_integer() else facts.alpha
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": facts.base_path,
        "r": facts.rank,
        "lora_alpha": alpha,
        "use_rslora": facts.rslora,
        "target_modules": list_peft_targets(hf_config, {key[:-2] for key in factors}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    with report_full_disk(folder / WEIGHTS):
        tensors = {spell_key(key): factor.contiguous() for key, factor in factors.items()}
        save_tensors(tensors, folder / WEIGHTS, {BASE_SUM: facts.base})
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def find_lost_in_transformers(hf_config: HfConfig, names: Collection[str]) -> list[str]:
    """Return the matrices whose factors peft 0.21 drops with transformers 5.

    There the experts of a layer are one parameter. PEFT turns targets that experts have into that
    parameter, and forgets modules of the same name outside of experts, such as dense MLPs.
    """
    of_experts = {tensor for rule, tensor in list_linears(hf_config) if rule.numbers_experts}
    modules = {module_of(tensor) for tensor in of_experts}
    return [
        name
        for name in names
        if not is_of_expert(name) and name.removesuffix(".weight").rpartition(".")[2] in modules
    ]


def list_peft_targets(hf_config: HfConfig, names: Collection[str]) -> list[str]:
    """Return `target_modules` that stand for exactly the matrices `names`.

    PEFT adapts every module that ends with a name, so a name stands only where all such modules of
    the model are adapted; the others are listed one by one.
    """
    by_module: dict[str, list[str]] = {}
    for name in list_matrices(hf_config):
        path = name.removesuffix(".weight")
        by_module.setdefault(path.rpartition(".")[2], []).append(path)
    adapted = {name.removesuffix(".weight") for name in names}
    targets: list[str] = []
    for module, paths in by_module.items():
        own = [path for path in paths if path in adapted]
        targets += [module] if len(own) == len(paths) else own
    return targets

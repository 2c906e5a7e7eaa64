"""Says which adapters SGLang serves beside the weights, and gives it factors by its rules.

    factors of q_proj and v_proj  --> k_proj gets factors that are 0 --> SGLang's qkv_proj

SGLang keeps projections of one input in one matrix, and their factors too; it finds no place for
factors of some of them alone. Source: sglang 0.5.23, srt/lora/lora.py.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mcore_rl.weights.lora.facts import is_of_expert, spell_key
from mcore_rl.weights.lora.places import FIRST, SECOND
from mcore_rl.weights.lora.targets import list_linears, list_targets
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.table import HfConfig, Shape

_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections whose factors SGLang keeps together."""
SERVED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Modules whose factors an engine serves."""
_OF_MLP = SERVED[4:]


def refuse_unserved(hf_config: HfConfig, targets: Collection[str], experts: bool) -> None:
    """Raise ValueError naming what an engine cannot serve as an adapter, and the remedy."""
    names = list_targets(hf_config, list(targets), experts)
    refuse_unserved_matrices(
        hf_config,
        names,
        "train.lora.sync=adapter",
        "set train.lora.targets=[q_proj,k_proj,v_proj,o_proj], or train.lora.sync=factors",
    )


def refuse_unserved_matrices(
    hf_config: HfConfig, names: Collection[str], where: str, remedy: str
) -> None:
    """Raise ValueError, with `where` and `remedy`, naming the first matrix that is not served."""
    if family_of(hf_config).has_tower:
        raise ValueError(f"{where}: engines serve no adapter of a model with a vision tower")
    has_experts = any(rule.numbers_experts or rule.stacked for rule, _ in list_linears(hf_config))
    for name in names:
        module = module_of_name(name)
        if is_of_expert(name):
            raise ValueError(
                f"{where} with factors of {name!r}: engines here serve no factors of routed"
                f" experts; {remedy}"
            )
        if module not in SERVED:
            raise ValueError(
                f"{where} with factors of {name!r}: engines serve those of {', '.join(SERVED)};"
                f" {remedy}"
            )
        if module in _OF_MLP and has_experts:
            raise ValueError(
                f"{where} with factors of {name!r}: in a model with routed experts, engines serve"
                f" factors of attention alone; {remedy}"
            )


def list_served_modules(names: Collection[str]) -> tuple[str, ...]:
    """Return the modules that an engine must know to serve factors of matrices `names`."""
    modules = {module_of_name(name) for name in names}
    for joined in _JOINED:
        if modules & {*joined}:
            modules |= {*joined}
    return tuple(module for module in SERVED if module in modules)


def make_engine_config(names: Collection[str], rank: int, scale: float) -> dict[str, Any]:
    """Return the configuration of an adapter of matrices `names`, by PEFT's names of fields.

    SGLang multiplies by lora_alpha / r and knows no other scale.
    """
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": scale * rank,
        "target_modules": list(list_served_modules(names)),
    }


def make_engine_factors(
    factors: Mapping[str, Tensor], shapes: Mapping[str, Shape]
) -> dict[str, Tensor]:
    """Return copies of factors in host memory by PEFT's names, with those that SGLang wants beside
    them.

    factors   by "<HF tensor>.A" and "<HF tensor>.B"
    shapes    of all weights of the model
    """
    tensors = {spell_key(key): factor.to("cpu", copy=True) for key, factor in factors.items()}
    names = {key[: -len(FIRST)] for key in factors}
    for name in sorted(names):
        first = factors[name + FIRST]
        for other in _list_beside(name):
            if other in names or other not in shapes:
                continue
            num_rows, num_columns = shapes[other]
            rank = len(first)
            zeros = {FIRST: (rank, num_columns), SECOND: (num_rows, rank)}
            for end, shape in zeros.items():
                tensors[spell_key(other + end)] = torch.zeros(shape, dtype=first.dtype)
    return tensors


def _list_beside(name: str) -> Iterator[str]:
    """Yield the matrices that SGLang keeps in one with matrix `name`."""
    module = module_of_name(name)
    for joined in _JOINED:
        if module in joined:
            for other in joined:
                if other != module:
                    yield name.removesuffix(f"{module}.weight") + f"{other}.weight"


def module_of_name(name: str) -> str:
    """Return the module's own name of an HF tensor, such as q_proj."""
    return name.removesuffix(".weight").rpartition(".")[2]

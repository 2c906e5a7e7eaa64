"""Names the matrices of a model that low-rank factors can be trained for.

They are those of Megatron's linear layers, by the names of HuggingFace modules as in PEFT's
`target_modules`: q_proj, o_proj, gate_proj, w1, kv_b_proj. Embeddings, output layer, routers and
vision towers are not among them.
"""

import re
from collections.abc import Sequence

from mcore_rl.weights.models import family_of, hf_tensor_shapes
from mcore_rl.weights.models.table import HfConfig, Rule

_LINEAR = re.compile(r"decoder\.layers\..*\.linear_[a-z0-9_]+\.weight")
_NUMBER = re.compile(r"\\{\w+\\}")


def name_modules(hf_config: HfConfig) -> list[str]:
    """Return the names that `list_targets` knows for a model, in the order of its table."""
    names = [_module_of(name) for name in _list_matrices(hf_config)]
    return list(dict.fromkeys(names))


def list_targets(hf_config: HfConfig, modules: Sequence[str], experts: bool = True) -> list[str]:
    """Return the HF names of the matrices of modules, in the order of the model's tensors.

    modules   as `name_modules` returns them; empty: all
    experts   whether routed experts are among them
    Raises ValueError naming a module that the model does not have.
    """
    known = name_modules(hf_config)
    for module in modules:
        if module not in known:
            raise ValueError(
                f"train.lora.targets has {module!r}, which is no linear layer of this model: it has"
                f" {', '.join(known)}"
            )
    wanted = set(modules or known)
    return [
        name
        for name in _list_matrices(hf_config)
        if _module_of(name) in wanted and (experts or ".experts." not in name)
    ]


def _module_of(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def _list_matrices(hf_config: HfConfig) -> list[str]:
    family = family_of(hf_config)
    patterns = [
        re.compile(_NUMBER.sub(r"\\d+", re.escape(tensor.name)))
        for rule in family.rules
        if _is_linear(rule)
        for tensor in rule.tensors
    ]
    shapes = hf_tensor_shapes(hf_config)
    return [
        name
        for name, shape in shapes.items()
        if len(shape) == 2 and any(pattern.fullmatch(name) for pattern in patterns)
    ]


def _is_linear(rule: Rule) -> bool:
    return not rule.stacked and _LINEAR.fullmatch(rule.key) is not None

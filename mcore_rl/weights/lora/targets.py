"""Names the matrices of a model that low-rank factors can be trained for.

They are those of Megatron's linear layers, by the names of HuggingFace modules as in PEFT's
`target_modules`: q_proj, o_proj, gate_proj, w1, kv_b_proj. Embeddings, output layer, routers,
vision towers, experts that are stacked in one tensor, and the indexers of sparse attention, which
no gradient reaches, are not among them.
"""

import re
from collections.abc import Iterator, Sequence

from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.table import HfConfig, HfTensor, Rule
from mcore_rl.weights.models.value_head import has_value_head

_LINEAR = re.compile(r"decoder\.layers\.(?!.*\.indexer\.).*\.linear_[a-z0-9_]+\.weight")


def name_modules(hf_config: HfConfig) -> list[str]:
    """Return the names that `list_targets` knows for a model, in the order of its table."""
    return list(dict.fromkeys(module_of(tensor) for _, tensor in list_linears(hf_config)))


def list_targets(hf_config: HfConfig, modules: Sequence[str], experts: bool = True) -> list[str]:
    """Return the HF names of the matrices of modules, in the order of the model's tensors.

    modules   as `name_modules` returns them; empty: all
    experts   whether routed experts are among them
    Raises ValueError naming a module that the model does not have, or if no matrix is left.
    """
    group = name_group(hf_config)
    known = name_modules(hf_config)
    for module in modules:
        if module not in known:
            raise ValueError(
                f"{group}.targets has {module!r}, which is no linear layer of this model: it has"
                f" {', '.join(known)}"
            )
    names = list_matrices(hf_config, modules, experts)
    if not names:
        raise ValueError(
            f"{group}.targets={list(modules)} with {group}.experts=false: only routed experts"
            f" have these layers; set {group}.experts=true, or name others"
        )
    return names


def name_group(hf_config: HfConfig) -> str:
    """Return the options of a model's factors; a critic alone has a value head."""
    return "critic.lora" if has_value_head(hf_config) else "train.lora"


def list_matrices(
    hf_config: HfConfig, modules: Sequence[str] = (), experts: bool = True
) -> list[str]:
    """Return what `list_targets` does, of modules that are known; maybe nothing."""
    family = family_of(hf_config)
    return [
        tensor.name.format(layer=layer, expert=expert)
        for rule, tensor, layer, expert in family.places(hf_config, family.sizes(hf_config))
        if is_adapted(rule, tensor, modules, experts)
    ]


def refuse_unused(hf_config: HfConfig, experts: bool) -> None:
    """Raise ValueError if experts are to be left alone in a model that has no such matrices."""
    if not experts and not any(rule.numbers_experts for rule, _ in list_linears(hf_config)):
        option = f"{name_group(hf_config)}.experts"
        raise ValueError(
            f"{option}=false, but no expert of this model has matrices of its own: leave {option}"
            " out"
        )


def list_linears(hf_config: HfConfig) -> Iterator[tuple[Rule, HfTensor]]:
    """Yield each kind of matrix that the model has and that can be adapted, with its rule."""
    family = family_of(hf_config)
    sizes = family.sizes(hf_config)
    for rule in family.rules:
        for tensor in rule.tensors:
            if is_adapted(rule, tensor, (), True) and all(sizes[axis] for axis in tensor.axes):
                yield rule, tensor


def is_adapted(rule: Rule, tensor: HfTensor, modules: Sequence[str], experts: bool) -> bool:
    """Return whether matrices of a kind get factors; see `list_targets`."""
    is_matrix = len(tensor.axes) == 2 and not rule.stacked
    is_linear = is_matrix and _LINEAR.fullmatch(rule.key) is not None
    is_wanted = not modules or module_of(tensor) in modules
    return is_linear and is_wanted and (experts or not rule.numbers_experts)


def module_of(tensor: HfTensor) -> str:
    return tensor.name.removesuffix(".weight").rpartition(".")[2]

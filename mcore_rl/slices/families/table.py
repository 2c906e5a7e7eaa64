"""What a family table is made of: rules that lay HF tensors, block by block, into one Megatron tensor.

linear_qkv, 4 query heads and 2 key-value heads (2 groups)     HF: q_proj = q0 q1 q2 q3,
q0 q1 k0 v0 | q2 q3 k1 v1                                          k_proj = k0 k1, v_proj = v0 v1
linear_fc1 of a gated MLP (1 group): gate up                   anything else: 1 group of 1 tensor
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

HfConfig = Mapping[str, Any]
"""The parsed `config.json` of a HuggingFace model directory."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class HfTensor:
    """HF name, in which {layer} and {expert} stand for numbers, and the names of its axis sizes.

    A model in which one of these sizes is 0 has no such tensor. `dtype` is kept whatever the model's is.
    """

    name: str
    axes: tuple[str, ...]
    dtype: str | None = None


@dataclass(frozen=True)
class Rule:
    """Megatron's tensor `key` is, on axis 0, `groups` times a block of rows of each of `tensors` in turn.

    `key` is written without a layer number. `where` says which layers have it ("model": no layer does).
    Rows past the last block are vocabulary padding if `padded`, else an error. `stacked`: Megatron has a
    tensor per expert; the HF tensor holds those of all experts, its first axis, each transposed.
    """

    key: str
    tensors: tuple[HfTensor, ...]
    where: Literal["model", "layer", "dense", "moe"] = "layer"
    groups: str | None = None
    padded: bool = False
    stacked: bool = False

    @property
    def has_expert_axis(self) -> bool:
        """Whether Megatron's tensor is that of a routed expert."""
        return self.stacked or self.numbers_experts

    @property
    def numbers_experts(self) -> bool:
        """Whether there is an HF tensor for each expert."""
        return "{expert}" in self.tensors[0].name

    def matrix_axes(self, tensor: HfTensor) -> tuple[str, ...]:
        """The axes of `tensor` as they lie in Megatron's tensor."""
        return tensor.axes[:0:-1] if self.stacked else tensor.axes


@dataclass(frozen=True)
class Family:
    """The table of one architecture. The functions read `config.json`; ValueError names what it lacks.

    sizes          axis sizes by the names used in `rules`
    is_moe_layer   whether layer number ... has experts
    options        the model in the words of megatron-core's TransformerConfig; layout and precision not
    supported      keys of `config.json` -> the values that the table and Megatron carry; absent is fine too
    rope_types     kinds of rotary embedding that Megatron's layers carry
    refusal        why a model is refused although each of its settings is supported; empty if it is not
    carried        pattern of HF names that a checkpoint may hold beside the model: not trained, not synced
    rotary_share   share of a head's width that the rotary embedding turns
    alternating    whether the rows of an expert's linear_fc1 are gate, up, gate, up instead of halves
    """

    architecture: str
    rules: tuple[Rule, ...]
    sizes: Callable[[HfConfig], Mapping[str, int]]
    is_moe_layer: Callable[[HfConfig, int], bool]
    options: Callable[[HfConfig], dict[str, Any]]
    supported: Mapping[str, tuple[Any, ...]]
    rope_types: tuple[str, ...] = ("default",)
    refusal: Callable[[HfConfig], str] = lambda config: ""
    carried: Callable[[HfConfig], str] = lambda config: ""
    rotary_share: Callable[[HfConfig], float] = lambda config: 1.0
    alternating: bool = False
    tied: Mapping[str, str] = field(
        default_factory=lambda: {"lm_head.weight": "model.embed_tokens.weight"}
    )
    """HF tensors that a model with tied embeddings leaves out -> the tensor that serves in their place."""

    @property
    def stacks_experts(self) -> bool:
        """Whether an HF tensor holds all experts of a layer."""
        return any(rule.stacked for rule in self.rules)

    def find(self, key: str) -> tuple[Rule, int | None]:
        """The rule of a Megatron key and the layer number written in the key, if any.

        ValueError names a key that the table does not know.
        """
        match = re.fullmatch(r"(.*\.layers\.)(\d+)\.(.*)", key)
        plain, layer = (match[1] + match[3], int(match[2])) if match else (key, None)
        for rule in self.rules:
            if rule.key == plain:
                return rule, layer
        raise ValueError(f"Megatron tensor {key!r} is not in the table of {self.architecture}")

    def shapes(self, config: HfConfig) -> dict[str, Shape]:
        """HF name -> shape of every tensor of the model, from its config alone."""
        sizes = self.sizes(config)
        return {
            name: tuple(sizes[axis] for axis in tensor.axes)
            for name, tensor in self._tensors(config, sizes)
        }

    def dtypes(self, config: HfConfig, dtype: str) -> dict[str, str]:
        """HF name -> dtype of every tensor of a model whose dtype is `dtype`."""
        return {
            name: tensor.dtype or dtype
            for name, tensor in self._tensors(config, self.sizes(config))
        }

    def left_out(self, config: HfConfig) -> frozenset[str]:
        """HF tensors that this model does not have because its embeddings are tied."""
        return frozenset(self.tied) if config.get("tie_word_embeddings", False) else frozenset()

    def is_carried(self, config: HfConfig, name: str) -> bool:
        """Whether a checkpoint may hold the tensor `name` although Megatron's model does not."""
        pattern = self.carried(config)
        return bool(pattern and re.fullmatch(pattern, name))

    def _tensors(
        self, config: HfConfig, sizes: Mapping[str, int]
    ) -> Iterator[tuple[str, HfTensor]]:
        for _, tensor, layer, expert in self.places(config, sizes):
            yield tensor.name.format(layer=layer, expert=expert), tensor

    def places(
        self, config: HfConfig, sizes: Mapping[str, int]
    ) -> Iterator[tuple[Rule, HfTensor, int | None, int | None]]:
        """Every tensor of the model: its rule, its place in it, and the numbers of layer and expert."""
        left_out = self.left_out(config)
        for rule in self.rules:
            present = [
                tensor
                for tensor in rule.tensors
                if tensor.name not in left_out and all(sizes[axis] for axis in tensor.axes)
            ]
            for layer, expert in self._places(rule, config, sizes) if present else ():
                for tensor in present:
                    yield rule, tensor, layer, expert

    def _places(
        self, rule: Rule, config: HfConfig, sizes: Mapping[str, int]
    ) -> Iterator[tuple[int | None, int | None]]:
        if rule.where == "model":
            yield None, None
            return
        experts = range(sizes["experts"]) if rule.numbers_experts else (None,)
        for layer in range(sizes["layers"]):
            if rule.where == "layer" or self.is_moe_layer(config, layer) == (rule.where == "moe"):
                yield from ((layer, expert) for expert in experts)

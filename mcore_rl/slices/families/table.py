"""What a family table is made of: rules that lay HF tensors, block by block, into one Megatron tensor.

linear_qkv, 4 query heads and 2 key-value heads (2 groups)     HF: q_proj = q0 q1 q2 q3,
q0 q1 k0 v0 | q2 q3 k1 v1                                          k_proj = k0 k1, v_proj = v0 v1
linear_fc1 of a gated MLP (1 group): gate up                   anything else: 1 group of 1 tensor
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

HfConfig = Mapping[str, Any]
"""The parsed `config.json` of a HuggingFace model directory."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class HfTensor:
    """HF name, in which {layer} and {expert} stand for numbers, and the names of its axis sizes."""

    name: str
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """Megatron's tensor `key` is, on axis 0, `groups` times a block of rows of each of `tensors` in turn.

    `key` is written without a layer number. `where` says which layers have it ("model": no layer does).
    Rows past the last block are vocabulary padding if `padded`, else an error.
    """

    key: str
    tensors: tuple[HfTensor, ...]
    where: Literal["model", "layer", "dense", "moe"] = "layer"
    groups: str | None = None
    padded: bool = False

    @property
    def has_expert_axis(self) -> bool:
        return "{expert}" in self.tensors[0].name


@dataclass(frozen=True)
class Family:
    """The table of one architecture; `sizes` and `is_moe_layer` read `config.json`."""

    architecture: str
    rules: tuple[Rule, ...]
    sizes: Callable[[HfConfig], Mapping[str, int]]
    is_moe_layer: Callable[[HfConfig, int], bool]
    tied: Mapping[str, str]
    """HF tensors that a model with tied embeddings leaves out -> the tensor that serves in their place."""

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
        left_out = self.left_out(config)
        return {
            tensor.name.format(layer=layer, expert=expert): tuple(sizes[axis] for axis in tensor.axes)
            for rule in self.rules
            for layer, expert in self._places(rule, config, sizes)
            for tensor in rule.tensors
            if tensor.name not in left_out
        }

    def left_out(self, config: HfConfig) -> frozenset[str]:
        """HF tensors that this model does not have because its embeddings are tied."""
        return frozenset(self.tied) if config.get("tie_word_embeddings", False) else frozenset()

    def _places(
        self, rule: Rule, config: HfConfig, sizes: Mapping[str, int]
    ) -> Iterator[tuple[int | None, int | None]]:
        if rule.where == "model":
            yield None, None
            return
        experts = range(sizes["experts"]) if rule.has_expert_axis else (None,)
        for layer in range(sizes["layers"]):
            if rule.where == "layer" or self.is_moe_layer(config, layer) == (rule.where == "moe"):
                yield from ((layer, expert) for expert in experts)

"""Layers for multi-token prediction (MTP), of models whose such layers can be trained.

Each predicts one token beyond the next, for engines that speculate. It has the model's embedding
and output layer, a projection of its own, and a layer like the model's last one:

    Megatron key                    HF name, DeepSeek-V3 with 61 layers         Qwen3-Next
    mtp.layers.0.eh_proj.weight     model.layers.61.eh_proj.weight              mtp.fc.weight
    mtp.layers.0.transformer_layer. model.layers.61.                            mtp.layers.0.
    mtp.layers.0.final_layernorm.   model.layers.61.shared_head.norm.           mtp.norm.

config.json has no word for whether they are trained, so a key of memory alone says it. Without it a
checkpoint's layers are carried along.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from mcore_rl.weights.models.rules import HF_LAYER, LAYER
from mcore_rl.weights.models.table import HfConfig, HfTensor, Rule

TRAINED = "trained_mtp_layers"
"""Key of the config in memory: the MTP layers that the model has; no file has it."""
DRAFT_MODEL = "draft_model"
"""Attribute of the model in an engine that speculates with these layers: the model of them."""
PREFIX = "mtp.layers."
"""Where Megatron's keys of these layers begin."""


def make_mtp_rules(
    like: Iterable[Rule], own: Mapping[str, HfTensor], hf_layer: str = HF_LAYER
) -> tuple[Rule, ...]:
    """Return the rules of MTP layers.

    like       the rules of a layer of the model that each of them contains
    own        key within the layer -> the HF tensor, of the modules that only they have
    hf_layer   how HF names of the layer begin; by default its number goes on behind those of the
               model's layers, otherwise it counts MTP layers
    """
    goes_on = hf_layer == HF_LAYER
    rules = [Rule(PREFIX + key, (tensor,), "mtp", goes_on=goes_on) for key, tensor in own.items()]
    for rule in like:
        key = rule.key.replace(LAYER, PREFIX + "transformer_layer.", 1)
        tensors = tuple(
            replace(tensor, name=tensor.name.replace(HF_LAYER, hf_layer, 1))
            for tensor in rule.tensors
        )
        rules.append(replace(rule, key=key, tensors=tensors, where="mtp", goes_on=goes_on))
    return tuple(rules)


def _make_own(name: str, *axes: str) -> HfTensor:
    return HfTensor(HF_LAYER + name, axes)


BEHIND_LAYERS: Mapping[str, HfTensor] = {
    "enorm.weight": _make_own("enorm.weight", "hidden"),
    "hnorm.weight": _make_own("hnorm.weight", "hidden"),
    "eh_proj.weight": _make_own("eh_proj.weight", "hidden", "mtp_in"),
    "final_layernorm.weight": _make_own("shared_head.norm.weight", "hidden"),
}
"""The modules of MTP layers in DeepSeek-V3 and GLM-4.5 to 4.7, as `make_mtp_rules` takes them."""
APART = "mtp."
"""Where HF names begin of a layer that is named apart from those of the model."""
ALONE_LAYER = APART + "layers.{layer}."
ALONE: Mapping[str, HfTensor] = {
    "enorm.weight": HfTensor("mtp.pre_fc_norm_embedding.weight", ("hidden",), initial="zeros"),
    "hnorm.weight": HfTensor("mtp.pre_fc_norm_hidden.weight", ("hidden",), initial="zeros"),
    "eh_proj.weight": HfTensor("mtp.fc.weight", ("hidden", "mtp_in")),
    "final_layernorm.weight": HfTensor("mtp.norm.weight", ("hidden",), initial="zeros"),
}
"""The same of the only MTP layer of Qwen3-Next and Qwen3.5."""


def list_copies(config: HfConfig) -> dict[str, str]:
    """Return HF name -> original of the tensors of which trained MTP layers may have a copy."""
    first = config["num_hidden_layers"]
    copies: dict[str, str] = {}
    for layer in range(first, first + config.get(TRAINED, 0)):
        copies[f"model.layers.{layer}.embed_tokens.weight"] = "model.embed_tokens.weight"
        copies[f"model.layers.{layer}.shared_head.head.weight"] = "lm_head.weight"
    return copies

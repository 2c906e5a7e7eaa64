"""Layers for multi-token prediction (MTP), of models whose such layers can be trained.

Each predicts one token beyond the next, for engines that speculate. It has the model's embedding
and output layer, a projection of its own, and a layer like the model's last one:

    Megatron key                              HF name, DeepSeek-V3 with 61 layers
    mtp.layers.0.eh_proj.weight           <-  model.layers.61.eh_proj.weight
    mtp.layers.0.transformer_layer.mlp.*  <-  model.layers.61.mlp.*
    mtp.layers.0.final_layernorm.weight   <-  model.layers.61.shared_head.norm.weight

config.json has no word for whether they are trained, so a key of memory alone says it. Without it a
checkpoint's layers are carried along.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from mcore_rl.weights.models.rules import HF_LAYER, LAYER
from mcore_rl.weights.models.table import HfConfig, HfTensor, Rule

TRAINED = "trained_mtp_layers"
"""Key of the config in memory: the MTP layers that the model has; no file has it."""
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys of config.json for the MTP layers of a checkpoint."""
PREFIX = "mtp.layers."
"""Where Megatron's keys of these layers begin."""


def count_mtp_layers(config: HfConfig) -> int:
    """Return the MTP layers of the checkpoint that config.json describes."""
    return next((config[key] for key in COUNTS if config.get(key)), 0)


def make_mtp_rules(
    like: Iterable[Rule], own: Mapping[str, HfTensor], hf_layer: str | None = None
) -> tuple[Rule, ...]:
    """Return the rules of MTP layers.

    like       the rules of a layer of the model that each of them contains
    own        key within the layer -> the HF tensor, of the modules that only they have
    hf_layer   HF name of such a layer; None: numbers go on behind those of the model's layers
    """
    goes_on = hf_layer is None
    rules = [Rule(PREFIX + key, (tensor,), "mtp", goes_on=goes_on) for key, tensor in own.items()]
    for rule in like:
        key = rule.key.replace(LAYER, PREFIX + "transformer_layer.", 1)
        tensors = tuple(
            replace(tensor, name=tensor.name.replace(HF_LAYER, hf_layer or HF_LAYER, 1))
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
"""The modules of MTP layers in DeepSeek-V3 and GLM-4.5, as `make_mtp_rules` takes them."""


ALONE_LAYER = "mtp.layers.{layer}."
"""HF name of the layer in MTP modules of Qwen3-Next and Qwen3.5, which have one."""
ALONE: Mapping[str, HfTensor] = {
    "enorm.weight": HfTensor("mtp.pre_fc_norm_embedding.weight", ("hidden",), initial="zeros"),
    "hnorm.weight": HfTensor("mtp.pre_fc_norm_hidden.weight", ("hidden",), initial="zeros"),
    "eh_proj.weight": HfTensor("mtp.fc.weight", ("hidden", "mtp_in")),
    "final_layernorm.weight": HfTensor("mtp.norm.weight", ("hidden",), initial="zeros"),
}
"""Their other modules, as `make_mtp_rules` takes them."""


def match_alone(config: HfConfig) -> str:
    """Return a pattern of the HF names in their MTP modules; "" if these are trained."""
    return "" if TRAINED in config else r"mtp\..*"


def list_copies(config: HfConfig) -> dict[str, str]:
    """Return HF name -> original of the tensors of which trained MTP layers may have a copy."""
    first = config["num_hidden_layers"]
    copies: dict[str, str] = {}
    for layer in range(first, first + config.get(TRAINED, 0)):
        copies[f"model.layers.{layer}.embed_tokens.weight"] = "model.embed_tokens.weight"
        copies[f"model.layers.{layer}.shared_head.head.weight"] = "lm_head.weight"
    return copies

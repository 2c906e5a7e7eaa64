"""Tiny models with layers for multi-token prediction, and their loss by transformers in float64.

transformers has no such layers. One of these is a model of one layer whose inputs are projected
hidden states and embeddings, so that a model of that size computes it, sequence by sequence.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mcore_rl.types import TrainBatch
from mcore_rl.weights.hf.config import read_hf_config, with_trained_mtp
from mcore_rl.weights.models import family_of, hf_tensor_shapes
from tests.support.exact_gradients import InDouble, use_double
from tests.support.tiny_models import write_model


@dataclass(frozen=True)
class Names:
    """HF names of the parts of such a layer, and what is added to the weights of its norms."""

    layer: str
    read: str
    seen: str
    project: str
    norm: str
    added: float


ALONE = Names(
    "mtp.layers.0.",
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.fc.weight",
    "mtp.norm.weight",
    added=1.0,
)
"""Those of Qwen3-Next and Qwen3.5."""
HEAD_LAYER = "model.layers.0."
"""The only layer of a model that computes such a layer."""


def name_parts(config: Any) -> Names:
    """Return the names in a model with this config of transformers."""
    if config.model_type.startswith(("qwen3_next", "qwen3_5")):
        return ALONE
    layer = f"model.layers.{config.num_hidden_layers}."
    norm = "final_layernorm" if config.model_type == "hy_v3" else "shared_head.norm"
    own = ("enorm", "hnorm", "eh_proj", norm)
    return Names(layer, *(f"{layer}{name}.weight" for name in own), added=0.0)


def write_mtp_model(kind: str, folder: Path, **changes: Any) -> Path:
    """Save a random model of family `kind` with one layer for multi-token prediction.

    As in published files, the layer has the embedding and the output layer again, if the family's
    does. Files of Qwen3-Next do not say that there is one.
    """
    if kind != "qwen3_next":
        count = "mtp_num_hidden_layers" if kind.startswith("qwen") else "num_nextn_predict_layers"
        changes[count] = 1
    write_model(kind, folder, **changes)
    plain = read_hf_config(folder)
    config = with_trained_mtp(plain)
    generator = torch.Generator().manual_seed(7)
    tensors = load_weights(folder)
    for name, shape in hf_tensor_shapes(config).items():
        if name not in tensors:
            noise = 0.1 * torch.randn(shape, generator=generator)
            is_plain_norm = name.endswith("norm.weight") and not kind.startswith("qwen")
            tensors[name] = noise + is_plain_norm
    copies = family_of(config).copies(config)
    tensors |= {copy: tensors[original].clone() for copy, original in copies.items()}
    save_weights(folder, tensors)
    return folder


def list_mtp_names(folder: Path) -> set[str]:
    """Return the HF names of the trained tensors of these layers."""
    plain = read_hf_config(folder)
    return hf_tensor_shapes(with_trained_mtp(plain)).keys() - hf_tensor_shapes(plain).keys()


def load_weights(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def save_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a model's only file of weights."""
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})


@dataclass(frozen=True)
class Drafted:
    """The loss of a layer on micro-batches, and its gradients, in float64.

    loss         mean over its predictions, nats
    acceptance   share of predictions whose best token is the policy's
    gradients    HF name -> gradient of the loss
    """

    loss: float
    acceptance: float
    gradients: dict[str, Tensor]


def draft_in_double(folder: Path, batches: Sequence[TrainBatch]) -> Drafted:
    """Return what the layer of the model in `folder` learns, by transformers."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = load_weights(folder)
    names = name_parts(policy.config)
    head = _make_head(policy.config, weights, names)
    own = {
        name: weights[name].double().requires_grad_()
        for name in (names.read, names.seen, names.project)
    }
    for model in (policy, head):
        use_double(model)
    losses, accepted = [], []
    for batch in batches:
        parts = (batch.token_ids_T, batch.loss_mask_T)
        for tokens_T, mask_T in zip(*(p.split(list(batch.lens_N)) for p in parts), strict=True):
            if len(tokens_T) > 2:
                loss_R, accepted_R = _draft(policy, head, own, names, tokens_T, mask_T)
                losses.append(loss_R)
                accepted.append(accepted_R)
    loss = torch.cat(losses).mean()
    loss.backward()
    of_head = _name_gradients(head)
    gradients = {name: parameter.grad for name, parameter in own.items()}
    gradients[names.norm] = of_head["model.norm.weight"]
    for name, gradient in of_head.items():
        if name.startswith(HEAD_LAYER):
            gradients[name.replace(HEAD_LAYER, names.layer, 1)] = gradient
    share = float(torch.cat(accepted).double().mean())
    found = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    return Drafted(float(loss.detach()), share, found)


def _make_head(config: Any, weights: Mapping[str, Tensor], names: Names) -> Any:
    """Return a model of one layer with the weights of an MTP layer."""
    from transformers import AutoModelForCausalLM

    settings = json.loads(config.to_json_string(use_diff=False))
    settings |= {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    if "mlp_layer_types" in settings:
        settings["mlp_layer_types"] = ["sparse"]
    if "layer_types" in settings:
        settings["layer_types"] = ["full_attention"]
    state = {name: weights[name] for name in ("lm_head.weight", "model.embed_tokens.weight")}
    state["model.norm.weight"] = weights[names.norm]
    alone = {names.read, names.seen, names.project, names.norm}
    for name, value in weights.items():
        if name.startswith(names.layer) and name not in alone:
            state[name.replace(names.layer, HEAD_LAYER, 1)] = value
    with TemporaryDirectory() as name:
        type(config)(**settings).save_pretrained(name)
        save_weights(Path(name), state)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True
        )
    head, info = loaded
    assert not info["missing_keys"], info
    head.lm_head.requires_grad_(False)
    return head


def _name_gradients(head: Any) -> dict[str, Tensor]:
    """Return HF name -> gradient, as a checkpoint of the model names its tensors."""
    found = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
    with TemporaryDirectory() as name:
        head.save_pretrained(name, state_dict=found)
        return load_weights(Path(name))


def _draft(
    policy: Any,
    head: Any,
    own: Mapping[str, Tensor],
    names: Names,
    tokens_T: Tensor,
    mask_T: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return (loss, whether it is accepted) of each prediction to learn in one sequence, [R]."""
    eps = policy.config.rms_norm_eps
    with torch.no_grad(), InDouble():
        hidden_TH = policy.model(tokens_T[None], use_cache=False).last_hidden_state[0]
        best_T = policy.lm_head(hidden_TH).argmax(-1)
        ahead_TH = policy.model.embed_tokens(tokens_T)
    with InDouble():
        read_TH = torch.nn.functional.rms_norm(
            ahead_TH[1:], ahead_TH.shape[1:], own[names.read] + names.added, eps
        )
        seen_TH = torch.nn.functional.rms_norm(
            hidden_TH[:-1], hidden_TH.shape[1:], own[names.seen] + names.added, eps
        )
        inputs_TH = torch.cat([read_TH, seen_TH], -1) @ own[names.project].T
        logits_TV = head(inputs_embeds=inputs_TH[None], use_cache=False).logits[0, :-1]
    loss_T = torch.nn.functional.cross_entropy(logits_TV, tokens_T[2:], reduction="none")
    learns_T = mask_T[2:]
    is_accepted_T = logits_TV.argmax(-1) == best_T[1:-1]
    return loss_T[learns_T], is_accepted_T[learns_T]


def write_bigram_model(begun: Path, folder: Path, seed: int, *, guesses: bool) -> Path:
    """Save a model of the sizes of `begun` whose next token depends on the last one alone.

    guesses   its layer for multi-token prediction predicts what the model finds best; otherwise it
              is random
    """
    shutil.copytree(begun, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = read_hf_config(begun)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in load_weights(begun).items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            tensors[name] = torch.zeros_like(tensor)
        elif "norm" in name.split(".")[-2]:
            tensors[name] = torch.ones_like(tensor)
        elif name.endswith("bias"):
            tensors[name] = tensor
        else:
            tensors[name] = 0.3 * noise
    if guesses:
        for name, tensor in tensors.items():
            if name.endswith(("eh_proj.weight", ALONE.project)):  # reads the embedding alone
                tensor.zero_()[:, : len(tensor)].fill_diagonal_(1.0)
    copies = family_of(config).copies(with_trained_mtp(config))
    tensors |= {copy: tensors[original].clone() for copy, original in copies.items()}
    save_weights(folder, tensors)
    return folder

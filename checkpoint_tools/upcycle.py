"""Turns a dense HuggingFace model into a mixture of experts with the same outputs.

Komatsuzaki et al. 2022, "Sparse Upcycling" (arXiv:2212.05055), section 3. Each expert is a copy of
the dense MLP. In the families made here the weights of a token's experts add up to 1, so the
experts together compute what the MLP did, whatever the router says, which begins at random.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from checkpoint_tools.assembly import whole
from checkpoint_tools.hf import open_plain
from checkpoint_tools.hf_model import read_config
from checkpoint_tools.hf_output import make_hf
from checkpoint_tools.options import Effort
from checkpoint_tools.produce import ConversionReport
from checkpoint_tools.safetensors_file import read_header
from checkpoint_tools.staging import refuse_existing
from checkpoint_tools.stored import Checkpoint, Chunk
from mcore_rl.process.disk import report_full_disk
from mcore_rl.weights.hf.files import save_tensors
from mcore_rl.weights.hf.folder import TEMPORARY, write_small_files
from mcore_rl.weights.models import FAMILIES, family_of, refuse_unsupported
from mcore_rl.weights.models.table import Family, HfConfig

EXPERTS_OF = {"LlamaForCausalLM": "MixtralForCausalLM", "Qwen3ForCausalLM": "Qwen3MoeForCausalLM"}
"""Dense architecture -> the one with experts that differs only in the MLP."""
LAYER = "decoder.layers."
DENSE_KEY = {
    LAYER + "pre_mlp_layernorm.weight": LAYER + "mlp.linear_fc1.layer_norm_weight",
    LAYER + "mlp.experts.experts.linear_fc1.weight": LAYER + "mlp.linear_fc1.weight",
    LAYER + "mlp.experts.experts.linear_fc2.weight": LAYER + "mlp.linear_fc2.weight",
}
"""Megatron's key in a layer with experts -> the key in a dense layer."""
ROUTER = LAYER + "mlp.router.weight"


def upcycle(
    source_hf: Path,
    out: Path,
    experts: int,
    top_k: int,
    seed: int,
    max_file_bytes: int,
    effort: Effort,
) -> ConversionReport:
    """Write the model of `source_hf` to `out` with `experts` experts per layer, `top_k` per token.

    The output layer gets weights of its own. Raises ValueError for numbers or a model that don't
    fit.
    """
    refuse_existing(out)
    if not 1 <= top_k <= experts or experts < 2:
        raise ValueError(
            f"--experts={experts} --top-k={top_k}: take two experts or more, and a top-k of 1 to"
            " their number"
        )
    config = read_config(source_hf)
    dense = family_of(config)
    if dense.architecture not in EXPERTS_OF:
        raise ValueError(
            f"{source_hf}: {dense.architecture} has no counterpart with experts here, only"
            f" {' and '.join(EXPERTS_OF)} have one"
        )
    settings = sparse_config(config, experts, top_k)
    refuse_unsupported(settings, f"the config.json to be of {out}")
    source = open_plain(source_hf)
    path = out.with_name(f"{out.name}.routers_{experts}_{seed}.safetensors")
    routers = _make_routers(path, settings, source, seed)
    sparse = FAMILIES[EXPERTS_OF[dense.architecture]]
    assemblies = {
        name: whole(chunk, name=name)
        for name, chunk in _chunks(dense, sparse, settings, source, routers)
    }
    describe = partial(write_small_files, config=settings, side_files_from=source_hf)
    report = make_hf(
        out, [source, routers], assemblies, frozenset(), describe, max_file_bytes, effort
    )
    path.unlink()
    return report


def sparse_config(config: HfConfig, experts: int, top_k: int) -> dict[str, Any]:
    """Return the config.json of the model with experts."""
    settings = {**config, "num_experts_per_tok": top_k, "tie_word_embeddings": False}
    settings["architectures"] = [EXPERTS_OF[config["architectures"][0]]]
    if settings["architectures"] == ["MixtralForCausalLM"]:
        return settings | {
            "model_type": "mixtral",
            "num_local_experts": experts,
            "sliding_window": None,
        }
    return settings | {
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "moe_intermediate_size": config["intermediate_size"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _chunks(
    dense: Family, sparse: Family, settings: HfConfig, source: Checkpoint, routers: Checkpoint
) -> Iterator[tuple[str, Chunk]]:
    """Yield the name of each tensor of the new model, and the chunk that holds its elements."""
    for rule, tensor, layer, expert in sparse.places(settings, sparse.sizes(settings)):
        name = tensor.name.format(layer=layer, expert=expert)
        if rule.key == ROUTER:
            yield name, routers.tensors[name].chunks[0]
            continue
        of_dense, _ = dense.find(DENSE_KEY.get(rule.key, rule.key))
        origin = of_dense.tensors[rule.tensors.index(tensor)].name.format(layer=layer)
        if origin not in source.tensors:
            origin = dense.tied[origin]
        yield name, source.tensors[origin].chunks[0]


def _make_routers(path: Path, settings: HfConfig, source: Checkpoint, seed: int) -> Checkpoint:
    """Return small random weights in the model's dtype, in a file at `path`.

    The file lies beside the output until that is complete, so that a rerun finds the same weights.
    """
    sparse = family_of(settings)
    rule, _ = sparse.find(ROUTER)
    sizes = sparse.sizes(settings)
    dtype = getattr(torch, source.tensors["model.embed_tokens.weight"].dtype)
    if not path.exists():
        generator = torch.Generator().manual_seed(seed)
        shape = (sizes["experts"], sizes["hidden"])
        scale = settings.get("initializer_range", 0.02)
        weights: dict[str, torch.Tensor] = {}
        for layer in range(sizes["layers"]):
            name = rule.tensors[0].name.format(layer=layer)
            weights[name] = (torch.randn(shape, generator=generator) * scale).to(dtype)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + TEMPORARY)
        with report_full_disk(temporary):
            save_tensors(weights, temporary)
        temporary.rename(path)
    tensors: Mapping[str, Any] = read_header(path)
    return Checkpoint("hf", path.parent, tensors, (), None)

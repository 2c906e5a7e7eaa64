"""A tower computes in the model's precision, and only the chosen part of it is trained."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.config import ParallelConfig, TrainConfig
from mcore_rl.train.model import make_chunks
from mcore_rl.train.transformer_config import make_transformer_config
from mcore_rl.train.vision.tower import Float32Buffers, embed_images, train_only, zero_of
from tests.support.distributed import run_alone
from tests.support.tiny_vision import TEXT, VISION, make_vision_batches

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    **TEXT,
    "rms_norm_eps": 1e-6,
    "vision_config": VISION,
    "image_token_id": 90,
}


def make_chunk(dtype: torch.dtype, recompute: str = "none") -> Any:
    train = TrainConfig(recompute=recompute)
    config = make_transformer_config(CONFIG, ParallelConfig(), dtype, train)
    [chunk] = make_chunks(config, CONFIG)
    return chunk


def describe_tower() -> dict[str, Any]:
    """Return what the tests look at in a tower of bfloat16, and in one of float32."""
    tower = make_chunk(torch.bfloat16).bfloat16().visual
    exact = make_chunk(torch.float32).visual
    for inner, outer in zip(tower.parameters(), exact.parameters(), strict=True):
        torch.manual_seed(inner.numel())
        outer.data.normal_(std=0.1)
        inner.data.copy_(outer.data)
    images = make_vision_batches()[1].images
    assert images is not None
    embeddings = embed_images(exact, images).embeddings_RH
    zero = zero_of(exact)
    zero.backward()
    return {
        "dtypes": {p.dtype for p in tower.parameters()},
        "buffers": {b.dtype for b in tower.buffers()},
        "saved": set(tower.state_dict()) - {name for name, _ in tower.named_parameters()},
        "cosine": torch.cosine_similarity(
            embed_images(tower, images).embeddings_RH.float(), embeddings
        ).min(),
        "shape": embeddings.shape,
        "zero": zero.item(),
        "gradients": {
            None if p.grad is None else p.grad.abs().max().item() for p in exact.parameters()
        },
    }


def keep_for_backward(recompute: str) -> tuple[int, dict[str, Tensor]]:
    """Return the bytes besides weights that a backward pass needs, and the gradients it gives."""
    tower = make_chunk(torch.float32, recompute).visual
    for parameter in tower.parameters():
        torch.manual_seed(parameter.numel())
        parameter.data.normal_(std=0.1)
    images = make_vision_batches()[1].images
    assert images is not None
    weights = {parameter.data_ptr() for parameter in tower.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        embeddings_RH = embed_images(tower, images).embeddings_RH
    embeddings_RH.square().sum().backward()
    return sum(kept.values()), {n: p.grad for n, p in tower.named_parameters()}


def compare_recomputation() -> list[tuple[int, dict[str, Tensor]]]:
    return [keep_for_backward(recompute) for recompute in ("none", "selective", "full")]


@pytest.mark.gloo
def test_recomputed_blocks_keep_less_and_have_the_same_gradients() -> None:
    (kept, gradients), *recomputed = run_alone(compare_recomputation)
    for fewer, same in recomputed:
        assert fewer < kept / 2
        assert same.keys() == gradients.keys()
        assert all(torch.equal(same[name], gradients[name]) for name in gradients)


@pytest.mark.gloo
def test_a_tower_keeps_its_frequencies_in_float32() -> None:
    found = run_alone(describe_tower)
    assert found["dtypes"] == {torch.bfloat16}
    assert found["buffers"] == {torch.float32}
    assert not found["saved"]
    assert found["cosine"] > 0.99
    assert found["shape"] == (1 * 8 * 10 // 4 + 1, 64)
    assert found["zero"] == 0.0
    assert found["gradients"] == {0.0}


def trained_names(part: str) -> list[str]:
    chunk = make_chunk(torch.float32)
    train_only([chunk], part)
    return [name for name, parameter in chunk.named_parameters() if parameter.requires_grad]


@pytest.mark.gloo
@pytest.mark.parametrize("part", [pytest.param("all", marks=pytest.mark.slow), "projector", "none"])
def test_only_the_chosen_part_is_trained(part: str) -> None:
    names = run_alone(trained_names, part)
    tower = {name.split(".")[1] for name in names if name.startswith("visual.")}
    parts = {"all": {"patch_embed", "blocks", "merger"}, "projector": {"merger"}, "none": set()}
    assert tower == parts[part]
    assert "decoder.layers.0.mlp.linear_fc1.weight" in names


def test_buffers_move_but_are_not_cast() -> None:
    inner = torch.nn.Module()
    inner.register_buffer("angles", torch.ones(2))
    wrapped = Float32Buffers(inner)
    wrapped.to(torch.bfloat16)
    assert wrapped.inner.angles.dtype == torch.float32  # type: ignore[union-attr]
    wrapped.to("meta", torch.bfloat16)
    assert wrapped.inner.angles.is_meta  # type: ignore[union-attr]
    with pytest.raises(AssertionError, match="parameters take the model's dtype"):
        Float32Buffers(torch.nn.Linear(1, 1))

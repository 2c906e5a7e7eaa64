"""Random weights are drawn by HF name, alike for every cut; test_critic.py fills value heads."""

import torch
from torch import Tensor

from mcore_rl.train.weights import draw_weights
from mcore_rl.weights.box import Box, Shard
from mcore_rl.weights.models import hf_tensor_shapes

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "initializer_range": 0.5,
}
NAME = "model.layers.0.self_attn.q_proj.weight"


def whole(name: str, shape: tuple[int, ...]) -> Shard:
    return cut(name, tuple(0 for _ in shape), shape)


def cut(name: str, start: tuple[int, ...], stop: tuple[int, ...]) -> Shard:
    box = Box(name, start, stop)
    strides = torch.empty(box.shape).stride()
    return Shard(box, "local", 0, strides, "float32")


def draw(shard: Shard, seed: int = 0) -> Tensor:
    tensors = {"local": torch.empty(shard.box.shape)}
    draw_weights([shard], tensors, CONFIG, seed)
    return tensors["local"]


def test_a_slice_has_the_values_of_the_whole_tensor() -> None:
    shape = hf_tensor_shapes(CONFIG)[NAME]
    full = draw(whole(NAME, shape))
    part = draw(cut(NAME, (3, 10), (7, 64)))
    assert torch.equal(part, full[3:7, 10:64])
    assert abs(full.mean().item()) < 0.05 and abs(full.std().item() - 0.5) < 0.05


def test_tensors_and_seeds_have_values_of_their_own() -> None:
    shape = hf_tensor_shapes(CONFIG)[NAME]
    full = draw(whole(NAME, shape))
    assert torch.equal(draw(whole(NAME, shape)), full)
    assert not torch.equal(draw(whole(NAME, shape), seed=1), full)
    assert not torch.equal(draw(whole(NAME.replace("layers.0", "layers.1"), shape)), full)


def test_norms_are_one() -> None:
    name = "model.norm.weight"
    assert (draw(whole(name, hf_tensor_shapes(CONFIG)[name])) == 1).all()

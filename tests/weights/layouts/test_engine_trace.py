"""The traced shards agree with the same loader run on real weights."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from mcore_rl.weights.layouts.engine_trace import trace_load_weights
from mcore_rl.weights.models import hf_tensor_shapes
from tests.support.engine_layout import EngineRank
from tests.support.megatron_layout import hf_weights, model_config


def traced(config: dict, engine: EngineRank) -> list:
    shapes = hf_tensor_shapes(config)
    return trace_load_weights(
        engine.load_weights,
        {name: (shape, torch.int64) for name, shape in shapes.items()},
        engine.params,
    ).shards


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_traced_shards_hold_what_the_loader_puts_there(tp, ep):
    config = model_config(tie_word_embeddings=tp == 4)
    weights = hf_weights(hf_tensor_shapes(config))
    for rank in range(tp):
        engine = EngineRank(config, rank, tp, ep)
        shards = traced(config, engine)
        for shard in shards:
            assert shard.view(engine.params).eq(-1).all(), "tracing wrote to a parameter"
        engine.load_weights(weights.items())
        for shard in shards:
            box = tuple(map(slice, shard.box.start, shard.box.stop))
            assert torch.equal(shard.view(engine.params), weights[shard.box.name][box]), shard


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda w: w.t(),
    lambda w: w.reshape(-1)[6:18],
    lambda w: w.view(2, 2, 6).transpose(0, 1)[1],
    lambda w: w.view(2, 2, 6).permute(2, 0, 1),
    lambda w: w[1::2],
    lambda w: w.unflatten(1, (2, 3))[:, 1],
    lambda w: w[2].unsqueeze(0).expand(3, 6),
    lambda w: w[:, 3:].clone(),
    lambda w: w.to(torch.float64)[1:3],
    lambda w: w.split(2)[1].chunk(2, dim=1)[0],
]


@pytest.mark.parametrize("index", range(len(VIEWS)))
def test_any_view_is_traced_to_boxes(index):
    view = VIEWS[index]
    weight = torch.arange(24).reshape(4, 6)
    param = torch.zeros(view(weight).shape, dtype=torch.int64)

    def load_weights(weights):
        for _, loaded in weights:
            param.copy_(view(loaded))

    shards = trace_load_weights(load_weights, {"w": ((4, 6), torch.int64)}, {"p": param}).shards
    for shard in shards:
        box = tuple(map(slice, shard.box.start, shard.box.stop))
        shard.view({"p": param}).copy_(weight[box])
    assert torch.equal(param, view(weight))


def fail(loader: Callable[[Tensor, Tensor], object], message: str) -> None:
    param = torch.zeros(4, 4)

    def load_weights(weights):
        for _, loaded in weights:
            loader(param, loaded)

    with pytest.raises(ValueError, match=message):
        trace_load_weights(load_weights, {"hf.w": ((4, 4), torch.float32)}, {"p.w": param})


def assign_data(param: Tensor, loaded: Tensor) -> None:
    param.data = loaded


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda p, w: p.copy_(w * 2), r"applies aten.mul.Tensor to 'hf.w'"),
        (
            lambda p, w: p.copy_(torch.cat([w[:2], torch.arange(8.0).view(2, 4)])),
            r"applies aten.cat.default to 'hf.w'",
        ),
        (
            lambda p, w: p.copy_(torch.cat([w[:2], w[2:]]) * 2),
            r"applies aten.mul.Tensor to 'hf.w \+ hf.w'",
        ),
        (
            lambda p, w: p.copy_(torch.cat([w, w])[:4]),
            r"applies aten.slice.Tensor to 'hf.w \+ hf.w'",
        ),
        (lambda p, w: p.fill_(w[0, 0].item()), r"_local_scalar_dense.default to 'hf.w'"),
        (lambda p, w: (w[:2].zero_(), p.copy_(w)), r"applies aten.zero_.default to 'hf.w'"),
        (lambda p, w: p.copy_(torch.arange(16.0).view(4, 4)), r"to parameter 'p.w' by aten.copy_"),
        (lambda p, w: (p[:2].zero_(), p[2:].copy_(p[:2])), r"parameter 'p.w' by aten.copy_"),
        (lambda p, w: p.add_(w), r"applies aten.add_.Tensor to 'hf.w'"),
        (lambda p, w: (p.copy_(w), p.mul_(2)), r"writes to parameter 'p.w' by aten.mul_"),
        (
            lambda p, w: torch.zeros(4, 4).copy_(w),
            r"'hf.w' to a tensor of shape \(4, 4\) that is no parameter",
        ),
        (lambda p, w: p.copy_(w[0]), r"'hf.w' of shape \(4,\) to shape \(4, 4\): broadcasting"),
        (lambda p, w: p[:3].copy_(w[:3]), r"'p.w': element 12 of 16 is not covered"),
        (lambda p, w: (p.copy_(w), p[2:].copy_(w[:2])), r"'p.w': element 8 of 16 is covered twice"),
        (lambda p, w: (p.copy_(w), p[3].zero_()), r"covered twice .*padding"),
        (lambda p, w: None, r"'p.w' is not covered"),
        (lambda p, w: p.view(-1)[:6].copy_(w.view(-1)[2:8]), r"'hf.w' wraps around axis 1"),
        (assign_data, r"replaced the memory of parameter 'p.w'"),
        (lambda p, w: p.copy_(w.nonexistent), r"tracing 'hf.w'.*nonexistent"),
    ],
)
def test_what_cannot_be_traced_fails_with_names(loader, message):
    fail(loader, message)


def test_equal_writes_count_once():
    """A tied embedding, padded to 3 rows, that is also loaded as the output layer."""
    param = torch.ones(3, 2)

    def load_weights(weights):
        for _, loaded in weights:
            for _ in range(2):
                param[:2].copy_(loaded)
                param[2:].zero_()

    traced = trace_load_weights(load_weights, {"hf.w": ((2, 2), torch.float32)}, {"p.w": param})
    [shard] = traced.shards
    assert (shard.box.name, shard.box.stop) == ("hf.w", (2, 2))
    assert param[2].tolist() == [0.0, 0.0]


def test_tensors_that_the_loader_joins_are_traced_each():
    weights = {"a": torch.arange(8).view(2, 4), "b": torch.arange(8, 20).view(3, 4)}
    params = {
        "rows": torch.zeros(5, 4, dtype=torch.int64),
        "columns": torch.zeros(4, 5, dtype=torch.int64),
    }

    def load_weights(named_weights):
        parts = [weight for _, weight in named_weights]
        params["rows"].copy_(torch.cat(parts).clone())
        params["columns"].copy_(torch.cat([part.t() for part in parts], dim=-1))

    described = {name: (tuple(weight.shape), torch.int64) for name, weight in weights.items()}
    for shard in trace_load_weights(load_weights, described, params).shards:
        shard.view(params).copy_(
            weights[shard.box.name][tuple(map(slice, shard.box.start, shard.box.stop))]
        )
    assert torch.equal(params["rows"], torch.cat(list(weights.values())))
    assert torch.equal(params["columns"], params["rows"].t())


def test_padding_beside_a_weight_is_filled_and_needs_no_weights():
    """SGLang's GPU loaders lengthen a weight with zeros, or copy zeros alone."""
    params = {"part": torch.full((4, 4), 7.0), "beyond": torch.full((2, 4), 7.0)}
    weight = torch.arange(12.0).view(3, 4)

    def load_weights(weights):
        for _, loaded in weights:
            params["part"].copy_(torch.cat([loaded, torch.zeros(1, 4)]).to(torch.float32))
            params["beyond"].copy_(torch.zeros(2, 4))

    traced = trace_load_weights(load_weights, {"w": ((3, 4), torch.float32)}, params)
    [shard] = traced.shards
    assert (shard.tensor, shard.box.stop) == ("part", (3, 4))
    assert torch.equal(params["part"], torch.tensor([7.0, 7.0, 7.0, 0.0])[:, None].expand(4, 4))
    shard.view(params).copy_(weight)
    assert torch.equal(params["part"], torch.cat([weight, torch.zeros(1, 4)]))
    assert traced.padded == {"part", "beyond"}
    params["beyond"].fill_(5.0)
    traced.fill_padding()
    assert not params["beyond"].any()


def test_padding_that_the_loader_zeroes_is_zeroed_and_needs_no_weights():
    param = torch.ones(4, 4)

    def load_weights(weights):
        for _, loaded in weights:
            param[:3].copy_(loaded)
            param[3:].fill_(0)

    traced = trace_load_weights(load_weights, {"w": ((3, 4), torch.float32)}, {"p": param})
    (shard,) = traced.shards
    assert shard.box.shape == (3, 4)
    assert param[:3].eq(1).all()
    assert param[3:].eq(0).all()
    param.fill_(2)
    traced.fill_padding()
    assert param[:3].eq(2).all()
    assert param[3:].eq(0).all()


def test_a_tensor_that_the_loader_sets_to_zero_before_it_copies_it_is_zero_and_needs_no_weights():
    param = torch.ones(2, 4)

    def load_weights(weights):
        for name, loaded in weights:
            param[0 if name == "a" else 1].copy_(loaded.zero_()[0] if name == "a" else loaded)

    described = {"a": ((3, 4), torch.float32), "b": ((4,), torch.float32)}
    (shard,) = trace_load_weights(load_weights, described, {"p": param}).shards
    assert shard.box.name == "b"
    assert param.tolist() == [[0.0] * 4, [1.0] * 4]


def test_matrices_of_fp8_parameters_are_traced_with_the_scales_of_their_blocks() -> None:
    params = {
        "fused.weight": torch.zeros(512, 200, dtype=torch.float8_e4m3fn),
        "fused.weight_scale_inv": torch.zeros(4, 2),
        "norm": torch.zeros(200, dtype=torch.bfloat16),
    }

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, loaded in weights:
            module, _, kind = name.partition(".")
            param = params["norm" if module == "norm" else f"fused.{kind}"]
            rows = len(param) // 2
            (
                param if module == "norm" else param[:rows] if module == "gate" else param[rows:]
            ).copy_(loaded)

    matrix, vector = ((256, 200), torch.bfloat16), ((200,), torch.bfloat16)
    named = {"gate.weight": matrix, "up.weight": matrix, "norm.weight": vector}
    shards = trace_load_weights(load_weights, named, params).shards
    assert [(s.box.name, s.box.shape, s.tensor, s.offset) for s in shards[2:]] == [
        ("norm.weight", (200,), "norm", 0),
        ("gate.weight_scale_inv", (2, 2), "fused.weight_scale_inv", 0),
        ("up.weight_scale_inv", (2, 2), "fused.weight_scale_inv", 4),
    ]
    params["fused.weight_scale"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"'fused.weight_scale' is not covered"):
        trace_load_weights(load_weights, named, params)

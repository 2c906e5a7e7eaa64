"""Layers that are alike are traced once; a loader that treats one differently is noticed."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from mcore_rl.weights.layouts import engine_trace
from mcore_rl.weights.layouts.engine_trace import TracedLoad, trace_load_weights
from mcore_rl.weights.layouts.repeated_layers import MIN_ALIKE, RepeatedLayers, split_layer

NUM_EXPERTS = 16
NUM_HELD = 8
WIDTH = 6
PADDED = 8
"""Rows of an expert in the engine's parameter, whose last two are padding."""
HfShapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Engine:
    """A model whose rank holds experts 4 to 11, in the order that `slot_of` gives."""

    def __init__(
        self, num_layers: int, slot_of: Callable[[int, int], int] = lambda layer, expert: expert - 4
    ) -> None:
        self.slot_of = slot_of
        self.given: list[str] = []
        self.params = {"embed": torch.full((4, 3), -1.0)}
        for layer in range(num_layers):
            self.params[f"m.layers.{layer}.up"] = torch.full((NUM_HELD, PADDED, 3), -1.0)
            self.params[f"m.layers.{layer}.norm"] = torch.full((3,), -1.0)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, loaded in weights:
            self.given.append(name)
            _, layer, rest = split_layer(name)
            if layer is None:
                self.params["embed"].copy_(loaded)
            elif rest == "norm":
                self.params[f"m.layers.{layer}.norm"].copy_(loaded)
            elif 4 <= int(rest.split(".")[1]) < 12:
                slot = self.slot_of(layer, int(rest.split(".")[1]))
                param = self.params[f"m.layers.{layer}.up"][slot]
                param[WIDTH:].zero_()
                param[:WIDTH].copy_(loaded)


def shapes(num_layers: int) -> HfShapes:
    typed: HfShapes = {"embed": ((4, 3), torch.float32)}
    for layer in range(num_layers):
        typed[f"model.layers.{layer}.norm"] = ((3,), torch.float32)
        for expert in range(NUM_EXPERTS):
            typed[f"model.layers.{layer}.experts.{expert}.up"] = ((WIDTH, 3), torch.float32)
    return typed


def traced_whole(engine: Engine, num_layers: int, monkeypatch: pytest.MonkeyPatch) -> TracedLoad:
    with monkeypatch.context() as patch:
        patch.setattr(engine_trace, "_trace_examples", lambda *_: None)
        return trace_load_weights(engine.load_weights, shapes(num_layers), engine.params)


@pytest.mark.parametrize("num_layers", [1, MIN_ALIKE - 1, MIN_ALIKE, 7])
def test_derived_layers_equal_those_that_are_traced(num_layers, monkeypatch):
    whole_engine = Engine(num_layers)
    whole = traced_whole(whole_engine, num_layers, monkeypatch)
    engine = Engine(num_layers)
    traced = trace_load_weights(engine.load_weights, shapes(num_layers), engine.params)
    assert set(traced.shards) == set(whole.shards)
    assert len(traced.shards) == len(whole.shards)
    for name, param in engine.params.items():
        assert torch.equal(param, whole_engine.params[name]), f"padding of {name}"
    most = NUM_EXPERTS + 1 + (num_layers - 1) * 7 + 1
    assert num_layers < MIN_ALIKE or len(engine.given) <= most


def test_padding_is_filled_again_in_derived_layers():
    engine = Engine(5)
    traced = trace_load_weights(engine.load_weights, shapes(5), engine.params)
    for param in engine.params.values():
        param.fill_(7)
    traced.fill_padding()
    has_changed = {name for name, param in engine.params.items() if not param.eq(7).all()}
    assert traced.padded == has_changed == {f"m.layers.{layer}.up" for layer in range(5)}
    for layer in range(5):
        param = engine.params[f"m.layers.{layer}.up"]
        assert not param[:, WIDTH:].any()
        assert param[:, :WIDTH].eq(7).all()


def turned(layer: int, expert: int) -> int:
    """Layers hold their experts in orders of their own."""
    return (expert - 4 + layer) % NUM_HELD


def exchanged(layer: int, expert: int) -> int:
    """Layer 2 exchanges its first two experts."""
    return {4: 1, 5: 0}.get(expert, expert - 4) if layer == 2 else expert - 4


@pytest.mark.parametrize("slot_of", [turned, exchanged])
def test_layers_that_are_loaded_unlike_are_traced_whole(slot_of, monkeypatch):
    whole = traced_whole(Engine(4, slot_of), 4, monkeypatch)
    engine = Engine(4, slot_of)
    traced = trace_load_weights(engine.load_weights, shapes(4), engine.params)
    assert set(traced.shards) == set(whole.shards)
    assert engine.given.count("model.layers.3.experts.9.up") >= 1


def test_padding_of_one_layer_only_is_found():
    class Odd(Engine):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            def odd() -> Iterable[tuple[str, Tensor]]:
                for name, loaded in weights:
                    if "layers.2.norm" in name:
                        self.params["m.layers.2.norm"].zero_()
                    else:
                        yield name, loaded

            super().load_weights(odd())

    engine = Odd(4)
    traced = trace_load_weights(engine.load_weights, shapes(4), engine.params)
    assert not engine.params["m.layers.2.norm"].any()
    assert "model.layers.2.norm" not in {shard.box.name for shard in traced.shards}
    assert "model.layers.3.norm" in {shard.box.name for shard in traced.shards}


def test_a_loader_that_reads_all_names_first_is_traced_whole():
    class Sorting(Engine):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            super().load_weights(sorted(weights, key=lambda named: named[0]))

    engine = Sorting(4)
    traced = trace_load_weights(engine.load_weights, shapes(4), engine.params)
    held = {shard.box.name for shard in traced.shards}
    assert len(held) == 4 * (NUM_HELD + 1) + 1


def test_only_layers_of_equal_shapes_follow_an_example():
    typed = shapes(5)
    typed["model.layers.1.norm"] = ((4,), torch.float32)
    params = Engine(5).params
    assert RepeatedLayers(typed, params).example_of == {2: 0, 3: 0, 4: 0}
    del params["m.layers.4.up"]
    assert RepeatedLayers(typed, params).example_of == {2: 0, 3: 0}
    params["m.layers.3.up"] = params["m.layers.3.up"].double()
    assert RepeatedLayers(typed, params).example_of == {}


def test_a_name_is_split_at_its_first_number():
    assert split_layer("model.layers.3.experts.7.up") == ("model.layers", 3, "experts.7.up")
    assert split_layer("model.w13.up") == ("model.w13.up", None, "")

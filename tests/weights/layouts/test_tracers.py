"""Tracers describe views without data; joined ones know their parts."""

from typing import Any

import pytest
import torch

from mcore_rl.weights.layouts.loader import Joined, Tracer, is_uniform


class Refusal:
    """A recorder that refuses every operation by the tensor's name."""

    device = torch.device("cpu")

    def on_tracer(self, tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
        raise ValueError(f"{func} on {tracer.hf_name}")

    def on_joined(self, joined: Joined, func: Any, args: Any, kwargs: Any) -> Any:
        raise ValueError(f"{func} on {joined.hf_name}")


def make_tracer(name: str, num_rows: int) -> Tracer:
    meta = torch.empty((num_rows, 4), dtype=torch.uint8, device="meta")
    return Tracer.make(meta, name, (num_rows, 4), torch.bfloat16, Refusal())


def test_a_joined_tensor_has_the_shape_of_its_parts_and_the_names_of_weights() -> None:
    parts = [make_tracer("a", 3), torch.zeros(2, 4), make_tracer("b", 1)]
    joined = Joined.make(parts, -2, Refusal())
    assert (tuple(joined.shape), joined.axis) == ((6, 4), 0)
    assert joined.hf_name == "a + b"
    cast = joined.cast(torch.float32)
    assert [part.dtype for part in (cast, *cast.parts)] == [torch.float32] * 4


def test_operations_go_to_the_recorder() -> None:
    tracer = make_tracer("a", 3)
    with pytest.raises(ValueError, match=r"aten.mul.Tensor on a$"):
        tracer * 2
    with pytest.raises(ValueError, match=r"aten.mul.Tensor on a \+ b$"):
        Joined.make([tracer, make_tracer("b", 1)], 0, Refusal()) * 2


def test_one_value_everywhere_is_uniform() -> None:
    assert is_uniform(torch.full((2, 3), 4.0))
    assert is_uniform(torch.zeros(0, 3))
    assert not is_uniform(torch.tensor([[0.0, 0.0], [0.0, 1.0]]))

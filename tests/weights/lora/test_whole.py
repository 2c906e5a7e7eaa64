"""Adapters with the faults that others have published are refused, with the tensor's name."""

import pytest

from mcore_rl.config import LoraConfig
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.lora.facts import AdapterFacts
from mcore_rl.weights.lora.whole import check_factor_shapes
from mcore_rl.weights.models.table import Shape

QWEN = ModelFacts.read("recipes/model/qwen3_30b_a3b").config
CONFIG = LoraConfig(rank=8, targets=["q_proj", "o_proj"])
WANTED = AdapterFacts.make(CONFIG, QWEN, "", "").list_factor_shapes(QWEN)
NAME = "model.layers.3.self_attn.q_proj.weight"
A, B = f"{NAME}.A", f"{NAME}.B"


def test_shapes_are_those_of_the_model() -> None:
    assert (WANTED[A], WANTED[B]) == ((8, 2048), (4096, 8))
    assert len(WANTED) == 2 * 2 * 48
    check_factor_shapes(WANTED, WANTED, "here")


@pytest.mark.parametrize(
    ("without", "changed", "message"),
    [
        ((B,), {}, f"here has factor A of '{NAME}' and no factor B: half an adapter"),
        ((A, B), {}, f"here lacks the factors of 1 of 96 matrices, the first is '{NAME}'"),
        ((), {A: (2048, 8)}, "shape (2048, 8), not (8, 2048): it lies transposed"),
        ((), {A: (16, 2048)}, "shape (16, 2048), not (8, 2048): it counts 2 times"),
        ((), {B: (4096, 32)}, "shape (4096, 32), not (4096, 8): it counts 4 times"),
        ((), {B: (2048, 8)}, "it belongs to another model or has another rank"),
        ((), {"model.layers.48.self_attn.q_proj.weight.A": (8, 2048)}, "belongs to another model"),
    ],
)
def test_a_fault_is_named(
    without: tuple[str, ...], changed: dict[str, Shape], message: str
) -> None:
    found = {key: shape for key, shape in WANTED.items() if key not in without} | changed
    with pytest.raises(ValueError) as error:
        check_factor_shapes(found, WANTED, "here")
    assert message in str(error.value)

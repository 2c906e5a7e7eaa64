"""Counts of config.json that would make lists without end are refused, by key and value."""

from typing import Any

import pytest

from mcore_rl.weights.models import refuse_counts, refuse_unsupported


@pytest.mark.parametrize("part", [None, "text_config", "vision_config"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 2.0),
        ("num_hidden_layers", True),
        ("num_experts", -1),
        ("n_routed_experts", 10**9),
        ("depth", "9"),
    ],
)
def test_a_count_without_bounds_is_refused(part: str | None, key: str, value: Any) -> None:
    config = {key: value} if part is None else {part: {key: value}}
    with pytest.raises(ValueError, match=rf"{key}={value!r} in a.json: it must be a whole number"):
        refuse_counts(config, "a.json")


def test_layers_and_experts_are_bounded_together() -> None:
    refuse_counts({"num_hidden_layers": 100, "num_experts": 512}, "a.json")
    with pytest.raises(ValueError, match=r"4000 layers of 4000 experts in a.json"):
        refuse_counts({"num_hidden_layers": 4000, "num_experts": 4000}, "a.json")


def test_a_model_is_refused_before_its_tensors_are_listed() -> None:
    config = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 10**9}
    with pytest.raises(ValueError, match=r"num_hidden_layers=1000000000 in config.json"):
        refuse_unsupported(config)

"""The parameters of experts in INT4; scenarios/weight_sync/test_int4_sync.py has SGLang's model."""

import pytest

from mcore_rl.rollout.packed_experts import find_sizes


def test_an_expert_has_a_gate_beside_its_first_matrix() -> None:
    assert find_sizes(64, 96) == {"w13": (192, 64), "w2": (64, 96)}


def test_a_rank_that_would_hold_half_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"w2 of an expert has 48 columns .* smaller rollout.tp"):
        find_sizes(64, 48)

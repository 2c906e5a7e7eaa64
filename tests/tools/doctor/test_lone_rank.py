"""Models of a lone rank: their size on a GPU, its batch, and that comparisons can fail."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.tools.doctor import lone_rank
from mcore_rl.weights.models import family_of, refuse_unsupported
from tests.support.distributed import run_ranks


@pytest.mark.parametrize("make", [lone_rank.qwen3_moe, lone_rank.deepseek_v3])
def test_the_models_of_a_gpu_have_between_one_and_three_billion_parameters(
    make: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_unsupported(make(), "config.json")
    monkeypatch.setattr(lone_rank, "has_cuda", lambda: True)
    config = make()
    refuse_unsupported(config, "config.json")
    shapes = family_of(config).shapes(config).values()
    assert 1e9 < sum(torch.Size(shape).numel() for shape in shapes) < 3e9


def test_the_batch_has_unequal_sequences_whose_first_tokens_are_not_trained() -> None:
    batch = lone_rank.make_batch(256, 128)
    assert sum(batch.lens_N) == len(batch.token_ids_T) == 256
    assert len(set(batch.lens_N)) > 1
    assert int((~batch.loss_mask_T).sum()) == len(batch.lens_N)
    assert batch.loss_weights_T is not None and float(batch.loss_weights_T.sum()) == pytest.approx(
        1
    )


def test_a_parameter_that_differs_is_named() -> None:
    ones = {"a": torch.ones(2), "b": torch.ones(2)}
    lone_rank.expect_same(ones, {"a": torch.ones(2)})
    with pytest.raises(AssertionError, match=r"1 parameters differ, first \['b'\]"):
        lone_rank.expect_same(ones, {"a": torch.ones(2), "b": torch.zeros(2)})


def test_a_repeated_step_may_differ_a_little_on_a_gpu_and_not_at_all_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = {"a": torch.zeros(4), "b": torch.zeros(2, dtype=torch.bfloat16)}
    expected = {"a": torch.full((4,), 2.0), "b": torch.zeros(2, dtype=torch.bfloat16)}
    near = {**expected, "a": torch.tensor([2.0, 2.0, 2.0, 2.2])}
    assert lone_rank.expect_same_step(expected, expected, before) == 0.0
    with pytest.raises(AssertionError, match=r"differs by 0\.0500 of its length, target 0\.0"):
        lone_rank.expect_same_step(near, expected, before)
    monkeypatch.setattr(lone_rank, "has_cuda", lambda: True)
    assert lone_rank.expect_same_step(near, expected, before) == pytest.approx(0.05)
    with pytest.raises(AssertionError, match=r"differs by 1\.0000 of its length, target 0\.1"):
        lone_rank.expect_same_step(before, expected, before)


def check_states(rank: int, world_size: int, port: int, folder: Path) -> None:
    """Compare a rank's states before and after a step, and give its memory up."""
    only = lone_rank.LoneRank(folder, lone_rank.qwen3_moe())
    only.step()
    state = only.state()
    lone_rank.expect_same(only.state(), state)
    kinds = {name.rsplit(".", 1)[1] for name in state if name.startswith("optimizer")}
    assert kinds == {"main", "exp_avg", "exp_avg_sq"}, kinds
    moments = [t for name, t in state.items() if name.endswith("exp_avg")]
    assert sum(t.numel() for t in moments) == sum(
        t.numel() for name, t in state.items() if name.startswith("weights")
    )
    only.step()
    after = only.state()
    assert not any(torch.equal(after[name], state[name]) for name in state), "nothing changed"
    only.free()
    assert all(p.untyped_storage().size() == 0 for p in only.actor.chunks[0].parameters())


@pytest.mark.gloo
def test_a_state_is_all_that_training_goes_on_from_and_memory_can_be_given_up(
    tmp_path: Path,
) -> None:
    run_ranks(check_states, 1, tmp_path)

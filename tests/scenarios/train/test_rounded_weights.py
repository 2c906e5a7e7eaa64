"""A model trains with rounded weights as one whose files were rounded by other code, bit for bit.

The optimizer updates the weights themselves: its step is that of the rounded model.
"""

from collections.abc import Callable
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mcore_rl.checks.sizes import check_rounding
from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.train.weights import local_tensors
from mcore_rl.weights.hf.config import ModelFacts
from tests.support.distributed import run_each
from tests.support.fp8_oracle import dequantize, per_block_cast_to_fp8
from tests.support.gradients import boxed_gradients
from tests.support.tiny_models import write_model
from tests.support.tiny_training import NUM_TOKENS, make_actor, my_batches, token_loss

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 4,
}
"""Heads have 64 rows, two to a block."""
LAYOUT: dict[str, Any] = {"tp": 2, "ep": 2}
Case = tuple[str, str]
"""(train.fake_quantization, model.path)"""


def round_fp8(weight_NK: Tensor) -> Tensor:
    return dequantize(*per_block_cast_to_fp8(weight_NK))


def round_int4(weight_NK: Tensor) -> Tensor:
    """Round groups of 32, by compressed-tensors' formula, in float64 but for its roundings."""
    groups = weight_NK.bfloat16().double().unflatten(-1, (-1, 32))
    scales = (groups.abs().amax(-1, keepdim=True) / 7.5).bfloat16().double()
    values = (groups / scales).bfloat16().double().round().clamp(-8, 7)
    return (values * scales).bfloat16().float().flatten(-2)


ROUND: dict[str, Callable[[Tensor], Tensor]] = {"fp8": round_fp8, "int4": round_int4}


def is_wanted(precision: str, name: str) -> bool:
    return name.endswith("_proj.weight") and (precision == "fp8" or ".mlp.experts." in name)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """Return, for each precision, the model that is rounded in training and a rounded one."""
    root = tmp_path_factory.mktemp("rounded")
    plain = write_model("qwen3_moe", root / "plain", **SIZES)
    found = []
    for precision, make in ROUND.items():
        folder = copytree(plain, root / precision)
        weights = load_file(folder / "model.safetensors")
        rounded = {n: make(w) if is_wanted(precision, n) else w for n, w in weights.items()}
        changed = [n for n, w in weights.items() if not torch.equal(w, rounded[n])]
        assert len(changed) == (2 * 4 if precision == "fp8" else 0) + 2 * 4 * 3
        save_file(rounded, folder / "model.safetensors")
        found += [(precision, str(plain)), ("none", str(folder))]
    return found


def run_case(rank: int, world_size: int, port: int, case: Case) -> Any:
    """Return log-probs, the stats of a step, its gradients, and changes of this rank's weights."""
    precision, path = case
    actor = make_actor(
        rank,
        world_size,
        port,
        ModelConfig(path=path),
        ParallelConfig(**LAYOUT),
        fake_quantization=precision,
    )
    before = {name: w.clone() for name, w in local_tensors(actor.chunks).items()}
    batches = my_batches()
    scores = actor.compute_logprobs(batches)
    for name, weight in local_tensors(actor.chunks).items():
        assert torch.equal(weight, before[name]), name
    stats = actor.train_step(batches, token_loss, temperature=1.0, num_tokens=NUM_TOKENS)
    gradients = boxed_gradients(actor)
    changes = {name: w - before[name] for name, w in local_tensors(actor.chunks).items()}
    return scores and [score.logprobs_T for score in scores], stats, gradients, changes


@pytest.mark.gloo
def test_passes_are_those_of_a_rounded_model_and_steps_change_the_weights(
    cases: list[Case],
) -> None:
    results = run_each(run_case, 2, cases)
    for first, wanted_of_ranks in zip(results[::2], results[1::2], strict=True):
        for got, wanted in zip(first, wanted_of_ranks, strict=True):
            assert (got[0] is None) == (wanted[0] is None)
            for got_T, wanted_T in zip(got[0] or (), wanted[0] or (), strict=True):
                assert torch.equal(got_T, wanted_T)
            assert got[1] == wanted[1]
            for (box, gradient), (same, other) in zip(got[2], wanted[2], strict=True):
                assert box == same
                assert torch.equal(gradient, other)
            for name, change in got[3].items():
                torch.testing.assert_close(change, wanted[3][name], rtol=0, atol=1e-7, msg=name)
                assert change.any() or "expert_bias" in name


def test_a_layout_that_cuts_blocks_is_refused_by_name(cases: list[Case]) -> None:
    policy = ModelFacts.read(cases[0][1])
    check_rounding(policy, ParallelConfig(tp=2, ep=2), "fp8")
    check_rounding(policy, ParallelConfig(tp=4, ep=4), "int4")
    with pytest.raises(
        ValueError,
        match=r"train\.fake_quantization=fp8 with .* trainer rank \d holds '.*proj\.weight' .* cuts"
        r" through 128 x 128 blocks of fp8 weights",
    ):
        check_rounding(policy, ParallelConfig(tp=4, ep=4), "fp8")

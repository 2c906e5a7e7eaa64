"""Stage "megatron": a rank of Megatron-core in training, without Transformer Engine.

The model is a Qwen3-MoE: on a GPU with 1.4 billion parameters in bfloat16, on a CPU a tiny one.
Torch modules stand in for Transformer Engine on both, so speed says nothing here.
"""

import time

import torch

from mcore_rl.device import forget_peak, peak_bytes, synchronize, use_torch_modules_on_cuda
from mcore_rl.tools.doctor.check import Check, Figures, Stage, expect, own_folder
from mcore_rl.tools.doctor.lone_rank import (
    LoneRank,
    compare_with_plan,
    difference_from_transformers,
    expect_same,
    expect_same_step,
    qwen3_moe,
)

NEEDED = ("megatron", "zlib_ng")


def _rank(dtype: str | None = None) -> LoneRank:
    use_torch_modules_on_cuda()
    return LoneRank(own_folder() / "model", qwen3_moe(), dtype)


def steps() -> Figures:
    """Ten steps on one batch: its negative log-likelihood falls, gradients are finite."""
    rank = _rank()
    first = rank.step()
    synchronize()
    began_s = time.monotonic()
    stats = [rank.step() for _ in range(9)]
    synchronize()
    seconds = (time.monotonic() - began_s) / len(stats)
    norms = [first.grad_norm, *(step.grad_norm for step in stats)]
    expect(all(0 < norm < float("inf") for norm in norms), f"gradient norms {norms}")
    expect(stats[-1].loss < first.loss - 0.1, f"loss from {first.loss} to {stats[-1].loss}")
    return {
        "loss_first": round(first.loss, 4),
        "loss_last": round(stats[-1].loss, 4),
        "tokens_per_s": round(len(rank.batch.token_ids_T) / seconds, 1),
        "peak_gib": round(peak_bytes() / 2**30, 3),
    }


def same_logprobs_as_transformers() -> Figures:
    """In float32, log-probs of an exported model are those of transformers."""
    rank = _rank(dtype="float32")
    difference = difference_from_transformers(rank, own_folder() / "hf")
    expect(difference.largest < 1e-2, f"log-probs differ by {difference.largest}")
    expect(difference.mean < 1e-4, f"in the mean by {difference.mean}")
    return difference.figures


def checkpoint() -> Figures:
    """After a save and a load all is there bit for bit, and a step is the one taken before."""
    saved = own_folder() / "saved"
    rank = _rank()
    rank.step()
    state, before = rank.state(), rank.weights()
    began_s = time.monotonic()
    rank.actor.save(saved, {})
    stopped_s = time.monotonic() - began_s
    rank.actor.finish_save()
    saved_s = time.monotonic() - began_s
    rank.step()
    expected = rank.weights()
    forget_peak()
    began_s = time.monotonic()
    rank.actor.load(saved)
    loaded_s = time.monotonic() - began_s
    loading_gib = peak_bytes() / 2**30
    expect_same(rank.state(), state)
    rank.step()
    share = expect_same_step(rank.weights(), expected, before)
    num_bytes = sum(file.stat().st_size for file in saved.rglob("*.distcp"))
    return {
        "gib": round(num_bytes / 2**30, 3),
        "training_stopped_s": round(stopped_s, 2),
        "saved_s": round(saved_s, 2),
        "loaded_s": round(loaded_s, 2),
        "loading_peak_gib": round(loading_gib, 2),
        "step_differs_by": share,
    }


def offload() -> Figures:
    """Everything moves to host memory and back; the next step is that of a rank that stayed."""
    rank = _rank()
    rank.step()
    before = rank.weights()
    rank.actor.hold(())
    rank.actor.hold(("weights", "training"))  # host memory is allocated the first time
    synchronize()
    began_s = time.monotonic()
    rank.actor.hold(())
    out_s = time.monotonic() - began_s
    began_s = time.monotonic()
    rank.actor.hold(("weights", "training"))
    in_s = time.monotonic() - began_s
    expect_same(rank.weights(), before)
    rank.step()
    after = rank.weights()
    changed = any(not torch.equal(after[name], before[name]) for name in before)
    expect(changed, "a step after the return changed nothing")
    gigabytes = rank.actor.held_bytes / 1e9
    return {
        "gb": round(gigabytes, 3),
        "out_gb_per_s": round(gigabytes / out_s, 2),
        "in_gb_per_s": round(gigabytes / in_s, 2),
    }


def planned_memory() -> Figures:
    """Compare the largest memory of a step with that of `mcore-rl plan`."""
    rank = _rank()
    for _ in range(3):
        rank.step()
    return compare_with_plan(rank)


MEGATRON = Stage(
    "megatron",
    "a training rank without Transformer Engine",
    (
        Check("steps", steps, deadline_s=240, modules=NEEDED),
        Check(
            "log-probs of transformers",
            same_logprobs_as_transformers,
            deadline_s=240,
            modules=(*NEEDED, "transformers"),
        ),
        Check("checkpoint", checkpoint, deadline_s=300, modules=NEEDED),
        Check("offload", offload, deadline_s=240, modules=NEEDED),
        Check("planned memory", planned_memory, deadline_s=240, gpu=True, modules=NEEDED),
    ),
)

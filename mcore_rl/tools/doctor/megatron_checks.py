"""Stages "probes" (NCCL, pinned memory, SGLang's memory saver) and "megatron", a rank in training.

Megatron-core trains a Qwen3-MoE without Transformer Engine: on a GPU with 1.4 billion parameters in
bfloat16, on a CPU a tiny one. Torch modules stand in for Transformer Engine on both, so speed says
nothing here.
"""

import multiprocessing as mp
import os
import time
from multiprocessing.connection import Connection
from typing import Literal

import torch

from mcore_rl.device import (
    can_pin_exactly,
    exact_pinning,
    forget_peak,
    peak_bytes,
    probes,
    synchronize,
)
from mcore_rl.device.setup import use_torch_modules_on_cuda
from mcore_rl.process.process_state import wait_killed
from mcore_rl.tools.doctor.check import (
    Check,
    Figures,
    SkipCheckError,
    Stage,
    expect,
    find_own_folder,
)
from mcore_rl.tools.doctor.lone_rank import (
    LoneRank,
    compare_with_plan,
    difference_from_transformers,
    expect_same,
    expect_same_step,
    qwen3_moe,
)

ODD_BYTES = int(1.1 * 2**30)


def check_nccl_max_ctas() -> Figures:
    """A group whose kernels are bounded works; 29 to 37 such groups share a GPU at 256 ranks."""
    group = probes.make_lone_group(probes.MAX_CTAS)
    expect(probes.reduce_alone(group), "an all-reduce changed its values")
    return {"max_ctas": probes.MAX_CTAS}


def check_nccl_abort() -> Figures:
    """Aborting a group returns at once, as a sync needs when a peer is lost."""
    group = probes.make_lone_group()
    expect(probes.reduce_alone(group), "an all-reduce changed its values")
    seconds = probes.abort_seconds(group)
    expect(seconds < 10, f"abort took {seconds:.1f} s")
    again = probes.make_lone_group()
    expect(probes.reduce_alone(again), "the group made after the abort does not work")
    return {"abort_s": round(seconds, 3)}


def check_pinned_rounding() -> Figures:
    """How much host memory a pinned block takes, by default and with a threshold set."""
    if not can_pin_exactly():
        raise SkipCheckError(f"torch {torch.__version__} always rounds up, and refuses the setting")
    taken = {"default": _measure_pinned({}), "set": _measure_pinned(exact_pinning({}))}
    figures = {f"{name}_gib": round(num_bytes / 2**30, 3) for name, num_bytes in taken.items()}
    expect(
        taken["set"] < 1.05 * ODD_BYTES,
        f"{figures} for {ODD_BYTES / 2**30:.2f} GiB: {exact_pinning({})} has no effect",
    )
    return {"asked_gib": round(ODD_BYTES / 2**30, 3), **figures}


def _measure_pinned(environment: dict[str, str]) -> int:
    """Start a process for the measurement: the allocator reads its setting only once."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    os.environ.update(environment)
    process = context.Process(target=_tell_pinned_bytes, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        expect(ours.poll(60), f"no answer with {environment}")
        return ours.recv()
    finally:
        process.kill()
        wait_killed(process, "the process of the probe")


def _tell_pinned_bytes(pipe: Connection) -> None:
    pipe.send(probes.measure_pinned_bytes(ODD_BYTES))


def check_memory_saver() -> Figures:
    """Released memory comes back at its place; its values only with a copy in host memory."""
    num_bytes = 1 << 30
    plain = probes.release_and_resume(num_bytes, with_backup=False)
    backed = probes.release_and_resume(num_bytes, with_backup=True)
    for kind, saved in (("without", plain), ("with", backed)):
        freed = saved.released / num_bytes
        expect(freed > 0.9, f"{kind} a copy, {freed:.0%} of the memory was released")
        expect(saved.same_place, f"{kind} a copy, the tensor lies elsewhere")
    expect(backed.kept, "values are lost although they were to be kept in host memory")
    return {"values_kept_without_copy": plain.kept, "values_kept_with_copy": backed.kept}


def check_attention_with_sinks() -> Figures:
    """Torch's flash attention, with sinks added around it, agrees with whole matrices."""
    figures = {}
    for window in (None, 128):
        error = probes.error_of_sinks(window)
        expect(error < 0.02, f"relative error {error:.3f} with window {window}")
        figures[f"error_window_{window}"] = round(error, 4)
    return figures


PROBES = Stage(
    "probes",
    "NCCL, pinned memory, released memory",
    (
        Check("NCCL with few blocks", check_nccl_max_ctas, gpu=True),
        Check("NCCL aborts", check_nccl_abort, gpu=True),
        Check("pinned memory is not rounded up", check_pinned_rounding, gpu=True),
        Check("attention with sinks", check_attention_with_sinks, gpu=True),
        Check("released memory", check_memory_saver, gpu=True, modules=("torch_memory_saver",)),
    ),
)


NEEDED = ("megatron", "zlib_ng")


def _rank(dtype: Literal["float32", "bfloat16"] | None = None) -> LoneRank:
    use_torch_modules_on_cuda()
    return LoneRank(find_own_folder() / "model", qwen3_moe(), dtype)


def check_steps() -> Figures:
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


def check_logprobs() -> Figures:
    """In float32, log-probs of an exported model are those of transformers."""
    rank = _rank(dtype="float32")
    difference = difference_from_transformers(rank, find_own_folder() / "hf")
    expect(difference.largest < 1e-2, f"log-probs differ by {difference.largest}")
    expect(difference.mean < 1e-4, f"in the mean by {difference.mean}")
    return difference.figures


def check_checkpoint() -> Figures:
    """After a save and a load all is there bit for bit, and a step is the one taken before."""
    saved = find_own_folder() / "saved"
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


def check_offload() -> Figures:
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


def check_planned_memory() -> Figures:
    """Compare the largest memory of a step with that of `mcore-rl plan`."""
    rank = _rank()
    for _ in range(3):
        rank.step()
    return compare_with_plan(rank)


MEGATRON = Stage(
    "megatron",
    "a training rank without Transformer Engine",
    (
        Check("steps", check_steps, deadline_s=240, modules=NEEDED),
        Check(
            "log-probs of transformers",
            check_logprobs,
            deadline_s=240,
            modules=(*NEEDED, "transformers"),
        ),
        Check("checkpoint", check_checkpoint, deadline_s=300, modules=NEEDED),
        Check("offload", check_offload, deadline_s=240, modules=NEEDED),
        Check("planned memory", check_planned_memory, deadline_s=240, gpu=True, modules=NEEDED),
    ),
)

"""Stage "probes": what NCCL, pinned memory and SGLang's memory saver do on this machine."""

import multiprocessing as mp
import os
from multiprocessing.connection import Connection

import torch

from mcore_rl.device import can_pin_exactly, exact_pinning, probes
from mcore_rl.process.process_state import wait_killed
from mcore_rl.tools.doctor.check import Check, Figures, SkipCheck, Stage, expect

ODD_BYTES = int(1.1 * 2**30)


def nccl_max_ctas() -> Figures:
    """A group whose kernels are bounded works; 29 to 37 such groups share a GPU at 256 ranks."""
    group = probes.make_lone_group(probes.MAX_CTAS)
    expect(probes.reduce_alone(group), "an all-reduce changed its values")
    return {"max_ctas": probes.MAX_CTAS}


def nccl_abort() -> Figures:
    """Aborting a group returns at once, as a sync needs when a peer is lost."""
    group = probes.make_lone_group()
    expect(probes.reduce_alone(group), "an all-reduce changed its values")
    seconds = probes.abort_seconds(group)
    expect(seconds < 10, f"abort took {seconds:.1f} s")
    again = probes.make_lone_group()
    expect(probes.reduce_alone(again), "the group made after the abort does not work")
    return {"abort_s": round(seconds, 3)}


def pinned_rounding() -> Figures:
    """How much host memory a pinned block takes, by default and with a threshold set."""
    if not can_pin_exactly():
        raise SkipCheck(f"torch {torch.__version__} always rounds up, and refuses the setting")
    taken = {"default": _pinned_bytes({}), "set": _pinned_bytes(exact_pinning({}))}
    figures = {f"{name}_gib": round(num_bytes / 2**30, 3) for name, num_bytes in taken.items()}
    expect(
        taken["set"] < 1.05 * ODD_BYTES,
        f"{figures} for {ODD_BYTES / 2**30:.2f} GiB: {exact_pinning({})} has no effect",
    )
    return {"asked_gib": round(ODD_BYTES / 2**30, 3), **figures}


def _pinned_bytes(environment: dict[str, str]) -> int:
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


def memory_saver() -> Figures:
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


def attention_with_sinks() -> Figures:
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
        Check("NCCL with few blocks", nccl_max_ctas, gpu=True),
        Check("NCCL aborts", nccl_abort, gpu=True),
        Check("pinned memory is not rounded up", pinned_rounding, gpu=True),
        Check("attention with sinks", attention_with_sinks, gpu=True),
        Check("released memory", memory_saver, gpu=True, modules=("torch_memory_saver",)),
    ),
)

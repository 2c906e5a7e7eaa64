"""Stage "sync": sends weights between processes on one machine. They must arrive whole, faults must
be refused, and the time is measured.

On a GPU the bytes travel through GPU memory that two processes share, on a CPU through shared
memory.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from mcore_rl.config import SyncConfig
from mcore_rl.device import device, has_cuda, synchronize
from mcore_rl.tools.doctor.check import Check, Figures, MissedTargetError, Stage, expect
from mcore_rl.tools.doctor.sync_ranks import run_scene
from mcore_rl.tools.doctor.toy_engine import (
    Fault,
    Scene,
    SceneOutcome,
    ToySizes,
    column_cut,
    expert_cut,
    row_cut,
)
from mcore_rl.weight_sync.buckets import plan_buckets
from mcore_rl.weight_sync.placed_bucket import PlacedBucket, find_holdings
from mcore_rl.weight_sync.wire import Report
from mcore_rl.weights.box import Box, Shard
from mcore_rl.weights.hf.fp8 import BLOCK
from mcore_rl.weights.hf.quantize import quantize_into
from mcore_rl.weights.plan.shared_region import Slice

FRACTION_OF_COPY = 0.5
"""Target: bytes per second of a sync, relative to those of a copy on the same GPU."""
FRACTION_PULLED = 0.55
"""The same where the engine reads the trainer's memory: a version is read twice, written once."""
MAX_SWAP_S = 0.020
"""Target: seconds for which an engine stands still while a staged version is swapped in."""
MAX_KERNELS = 100
"""Target: kernels that pack, verify and place a bucket of 1,000 slices."""
GPU_BUCKET_MIB = 64
"""As in recipes/cluster/gpu.yaml: a bucket is to take longer than the calls that move it."""
LARGE = ToySizes(hidden=2048, heads=16, head=128, experts=896, inner=768, vocab=32768)
"""8 GiB in bfloat16."""
SMALL = ToySizes(hidden=256, heads=4, head=64, experts=256, inner=128, vocab=1024)


def _make_scene(scene: Scene) -> SceneOutcome:
    """Run a scene on this machine's device."""
    on_gpu = has_cuda()
    return run_scene(replace(scene, on_gpu=(on_gpu, on_gpu)))


def _have_same_bits(scene: Scene) -> Figures:
    outcome = _make_scene(scene)
    errors = [report.error for report in outcome.reports if report.error is not None]
    expect(not errors, f"{errors[:1]}")
    for rank, received in enumerate(outcome.receivers):
        expect(not received.differing, f"engine rank {rank}: {received.differing[:3]} differ")
    return {"bytes": sum(received.reports[1].num_bytes for received in outcome.receivers)}


def check_in_place() -> Figures:
    """Two trainer ranks, cut by rows, into one engine rank."""
    return _have_same_bits(Scene(row_cut, 2, 1, timeout_s=120))


def check_after_release() -> Figures:
    """An engine that gave up its memory in between, padding included."""
    return _have_same_bits(Scene(row_cut, 1, 2, timeout_s=120, releases_memory=True))


def check_cast_while_packed() -> Figures:
    """Float32 masters, cut by columns, into two bfloat16 engine ranks."""
    return _have_same_bits(Scene(column_cut, 3, 2, dtype="bfloat16", timeout_s=120))


def check_staged() -> Figures:
    """Experts and replicas into two ranks that swap versions in."""
    return _have_same_bits(
        Scene(expert_cut, 3, 2, "bfloat16", timeout_s=120, staged=True, num_syncs=3)
    )


def check_pulled() -> Figures:
    """Engine ranks read experts and replicas from the trainer's memory, and swap versions in."""
    cut = Scene(expert_cut, 3, 2, "bfloat16", "bfloat16", timeout_s=120, staged=True, num_syncs=3)
    return _have_same_bits(replace(cut, pull=True))


def _run_faulty(kind: str, timeout_s: float) -> tuple[SceneOutcome, Report]:
    fault = Fault(rank=0, message=2, kind=kind)
    outcome = _make_scene(Scene(row_cut, 1, 1, timeout_s=timeout_s, num_syncs=1, fault=fault))
    return outcome, outcome.receivers[0].reports[-1]


def check_corrupt_byte() -> Figures:
    """A byte that changes in transit is refused; the error names slice and sender."""
    _, report = _run_faulty("corrupt", timeout_s=60)
    error = report.error or ""
    expect("has checksum" in error and "trainer rank 0" in error, f"the error is {error!r}")
    return {}


def check_killed_sender() -> Figures:
    """A sender that dies fails the receiver at once, by name."""
    return _check_lost_sender("kill", timeout_s=30, least_s=0.0, most_s=15.0)


def check_stopped_sender() -> Figures:
    """A sender that hangs fails the receiver at its deadline, by name."""
    return _check_lost_sender("stop", timeout_s=6, least_s=5.0, most_s=16.0)


def _check_lost_sender(kind: str, timeout_s: float, least_s: float, most_s: float) -> Figures:
    outcome, report = _run_faulty(kind, timeout_s)
    error = report.error or ""
    expect(outcome.senders == [None], "the sender is still there")
    expect("from trainer rank 0" in error, f"the error is {error!r}")
    in_time = least_s <= report.seconds <= most_s
    expect(in_time, f"noticed after {report.seconds:.1f} s, not {least_s} to {most_s} s")
    return {"noticed_s": round(report.seconds, 3)}


def check_kernels() -> Figures:
    """A bucket of 1,000 slices takes few kernels, or few operators on a CPU."""
    shards = [
        Shard(Box(f"w{i}", (0,), (300,)), "flat", 300 * i, (1,), "float32") for i in range(1000)
    ]
    slices = {(0, 0): [Slice(shard.box, "bfloat16") for shard in shards]}
    (bucket,) = plan_buckets(slices, 1, 1 << 21)
    held = find_holdings(bucket, {shard.box.name: [shard] for shard in shards})
    words_W = torch.zeros(bucket.num_words, dtype=torch.int64, device=device())
    flat = torch.randn(300_000, device=device())
    placed = PlacedBucket(bucket, words_W, held, {"flat": flat})
    placed.pack(1)
    activity = torch.profiler.ProfilerActivity
    profile = torch.profiler.profile(activities=[activity.CUDA if has_cuda() else activity.CPU])
    with profile:
        placed.pack(1)
        placed.place(1)
    kind = "CUDA" if has_cuda() else "CPU"
    kernels = [e.name for e in profile.events() or () if e.device_type.name == kind]
    figures: Figures = {"kernels": len(kernels), "slices": len(shards)}
    expect(bool(kernels), "the profiler saw nothing")
    if has_cuda() and len(kernels) > MAX_KERNELS:
        raise MissedTargetError(f"{len(kernels)} kernels, target {MAX_KERNELS}", figures)
    return figures


def check_fp8_packing() -> Figures:
    """Bytes of bfloat16 per second that become FP8 blocks with their scales.

    On a GPU a kernel of our own does it, with the bits that torch gives on a CPU.
    """
    num_rows = 8192 if has_cuda() else 1024
    weights_NK = torch.randn(num_rows, 7168, dtype=torch.bfloat16, device=device())
    values_NK = torch.empty_like(weights_NK, dtype=torch.float8_e4m3fn)
    blocks = -(-num_rows // BLOCK), -(-7168 // BLOCK)
    scales_nk = torch.empty(blocks, device=device())
    seconds = _seconds(lambda: quantize_into(weights_NK, values_NK, scales_nk))
    scales_NK = scales_nk.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    error_NK = (values_NK.float() * scales_NK[:num_rows, :7168] - weights_NK.float()).abs()
    worst = float((error_NK / scales_NK[:num_rows, :7168]).max())
    expect(worst <= 16.01, f"a value is off by {worst:.2f} of its scale")  # half of e4m3's 32
    _expect_torchs_bits(weights_NK[: 2 * BLOCK], values_NK[: 2 * BLOCK], scales_nk[:2])
    return {"gb_per_s": _rate(weights_NK.nbytes, seconds), "gb": weights_NK.nbytes / 1e9}


def _expect_torchs_bits(weights_NK: Tensor, values_NK: Tensor, scales_nk: Tensor) -> None:
    """Quantize the same weights on the CPU and compare."""
    wanted_NK = torch.empty(values_NK.shape, dtype=values_NK.dtype)
    wanted_nk = torch.empty(scales_nk.shape)
    quantize_into(weights_NK.cpu(), wanted_NK, wanted_nk)
    expect(torch.equal(scales_nk.cpu(), wanted_nk), "scales have other bits than torch's")
    same = torch.equal(values_NK.cpu().view(torch.uint8), wanted_NK.view(torch.uint8))
    expect(same, "values have other bits than torch's")


def check_rate_in_place() -> Figures:
    """A large model into the engine's parameters, beside a copy on the same device."""
    return _measure_rates(staged=False)


def check_rate_staged() -> Figures:
    """A large model into the engine's staging memory, then swapped in."""
    return _measure_rates(staged=True)


def check_rate_pulled() -> Figures:
    """A large model, read by the engine from the trainer's memory."""
    return _measure_rates(staged=False, pull=True)


def _measure_rates(*, staged: bool, pull: bool = False) -> Figures:
    sizes = LARGE if has_cuda() else SMALL
    scene = Scene(
        row_cut,
        1,
        1,
        dtype="bfloat16",
        sender_dtype="bfloat16",
        sizes=sizes,
        bucket_bytes=int((GPU_BUCKET_MIB if has_cuda() else SyncConfig().bucket_mib) * 2**20),
        timeout_s=180,
        num_syncs=4,
        staged=staged,
        pull=pull,
    )
    outcome = _make_scene(scene)
    errors = [report.error for report in outcome.reports if report.error is not None]
    expect(not errors, f"{errors[:1]}")
    [received] = outcome.receivers
    expect(not received.differing, f"{received.differing[:3]} differ")
    [sent] = outcome.senders
    assert sent is not None, "a sender without errors is alive"
    num_bytes = sent[1].num_bytes
    sync_s = median(report.seconds for report in sent[2:])
    copy_s = _measure_copy(num_bytes)
    figures: Figures = {
        "gb": num_bytes / 1e9,
        "sync_gb_per_s": _rate(num_bytes, sync_s),
        "copy_gb_per_s": _rate(num_bytes, copy_s),
        "fraction_of_copy": round(copy_s / sync_s, 3),
    }
    if staged:
        figures["swap_ms"] = round(1000 * median(received.swap_seconds[1:]), 3)
    _check_targets(figures, FRACTION_PULLED if pull else FRACTION_OF_COPY)
    return figures


def _check_targets(figures: Figures, least: float) -> None:
    """Targets hold for a GPU; on a CPU the figures only show that the check works."""
    if not has_cuda():
        return
    if figures["fraction_of_copy"] < least:
        why = f"{figures['fraction_of_copy']} of a copy's rate, target {least}"
        raise MissedTargetError(why, figures)
    if figures.get("swap_ms", 0.0) > 1000 * MAX_SWAP_S:
        raise MissedTargetError(f"{figures['swap_ms']} ms, target {1000 * MAX_SWAP_S:g}", figures)


def _measure_copy(num_bytes: int) -> float:
    source_u8 = torch.ones(num_bytes, dtype=torch.uint8, device=device())
    target_u8 = torch.empty_like(source_u8)
    return _seconds(lambda: target_u8.copy_(source_u8))


def _seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds of `work` until the device is done with it, after one run to warm up."""
    taken = []
    for _ in range(repeats + 1):
        synchronize()
        began_s = time.perf_counter()
        work()
        synchronize()
        taken.append(time.perf_counter() - began_s)
    return median(taken[1:])


def _rate(num_bytes: int, seconds: float) -> float:
    return round(num_bytes / 1e9 / seconds, 3)


SYNC = Stage(
    "sync",
    "weights from process to process on one machine",
    (
        Check("in place", check_in_place, deadline_s=150),
        Check("after a release of memory", check_after_release, deadline_s=150),
        Check("cast while packed", check_cast_while_packed, deadline_s=150),
        Check("staged", check_staged, deadline_s=150),
        Check("pulled", check_pulled, deadline_s=150),
        Check("a changed byte is refused", check_corrupt_byte),
        Check("a killed sender is named", check_killed_sender),
        Check("a stopped sender is named", check_stopped_sender),
        Check("kernels of a bucket", check_kernels),
        Check("FP8 packing", check_fp8_packing),
        Check("rate in place", check_rate_in_place, deadline_s=240),
        Check("rate staged", check_rate_staged, deadline_s=240),
        Check("rate pulled", check_rate_pulled, deadline_s=240),
    ),
)

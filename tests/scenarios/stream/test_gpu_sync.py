"""Syncs between ranks whose tensors lie on GPUs: by shared GPU memory, NCCL, or the host."""

import pytest
import torch

from mcore_rl.device import device, has_cuda
from mcore_rl.doctor.sync_processes import run_scene
from mcore_rl.doctor.sync_scene import Fault, Scene
from mcore_rl.doctor.toy_engine import column_cut, expert_cut, row_cut
from mcore_rl.slices.box import Box, Shard
from mcore_rl.slices.plan.shared_region import Slice
from mcore_rl.stream.buckets import plan_buckets
from mcore_rl.stream.placed_bucket import PlacedBucket, holdings

TWO_GPUS = pytest.mark.skipif(
    torch.accelerator.device_count() < 2, reason="NCCL takes a GPU per rank"
)
THREE_GPUS = pytest.mark.skipif(
    torch.accelerator.device_count() < 3, reason="NCCL takes a GPU per rank"
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gloo,
    pytest.mark.skipif(not has_cuda(), reason="needs a GPU"),
]

BOTH = (True, True)
SCENES = [
    pytest.param(Scene(row_cut, 2, 1, timeout_s=120, on_gpu=BOTH), id="GPU memory"),
    pytest.param(
        Scene(expert_cut, 3, 2, "bfloat16", timeout_s=120, on_gpu=BOTH, staged=True),
        id="GPU memory, staged",
    ),
    pytest.param(
        Scene(row_cut, 1, 1, bucket_bytes=1 << 20, timeout_s=120, on_gpu=BOTH), id="large buckets"
    ),
    pytest.param(Scene(column_cut, 2, 2, timeout_s=120, on_gpu=(True, False)), id="to the host"),
    pytest.param(Scene(column_cut, 2, 2, timeout_s=120, on_gpu=(False, True)), id="from the host"),
    pytest.param(
        Scene(column_cut, 1, 2, timeout_s=120, on_gpu=(True, False), between_machines=True),
        id="to another host",
    ),
    pytest.param(
        Scene(row_cut, 1, 1, timeout_s=120, on_gpu=BOTH, between_machines=True),
        id="NCCL",
        marks=TWO_GPUS,
    ),
    pytest.param(
        Scene(row_cut, 2, 1, timeout_s=120, on_gpu=BOTH, between_machines=True, staged=True),
        id="NCCL, staged",
        marks=THREE_GPUS,
    ),
]
ROUTES = pytest.mark.parametrize(
    "between_machines",
    [pytest.param(False, id="GPU memory"), pytest.param(True, id="NCCL", marks=TWO_GPUS)],
)


@pytest.mark.parametrize("scene", SCENES)
def test_every_parameter_is_bit_for_bit_what_the_engines_own_loader_puts_there(
    scene: Scene,
) -> None:
    outcome = run_scene(scene)
    assert [report.error for report in outcome.reports] == [None] * len(outcome.reports)
    assert [received.differing for received in outcome.receivers] == [[]] * scene.num_receivers


@ROUTES
def test_a_byte_changed_in_transit_is_refused_by_name(between_machines: bool) -> None:
    fault = Fault(rank=0, message=2, kind="corrupt")
    scene = Scene(
        row_cut,
        1,
        1,
        timeout_s=60,
        num_syncs=1,
        fault=fault,
        on_gpu=BOTH,
        between_machines=between_machines,
    )
    [received] = run_scene(scene).receivers
    error = received.reports[1].error
    assert error is not None and "has checksum" in error and "trainer rank 0" in error


@ROUTES
@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_sender_that_dies_or_hangs_is_named_by_the_deadline(
    kind: str, between_machines: bool
) -> None:
    fault = Fault(rank=0, message=3, kind=kind)
    scene = Scene(
        row_cut,
        1,
        1,
        timeout_s=30,
        num_syncs=1,
        fault=fault,
        on_gpu=BOTH,
        between_machines=between_machines,
    )
    outcome = run_scene(scene)
    report = outcome.receivers[0].reports[1]
    assert outcome.senders == [None]
    assert report.error is not None and "from trainer rank 0" in report.error
    assert report.seconds < scene.timeout_s + 10


def test_a_bucket_takes_few_kernels_however_many_slices_it_has() -> None:
    shards = [
        Shard(Box(f"w{i}", (0,), (300,)), "flat", 300 * i, (1,), "float32") for i in range(1000)
    ]
    (bucket,) = plan_buckets(
        {(0, 0): [Slice(shard.box, "bfloat16") for shard in shards]}, 1, 1 << 21
    )
    held = holdings(bucket, {shard.box.name: [shard] for shard in shards})
    words_W = torch.zeros(bucket.num_words, dtype=torch.int64, device=device())
    placed = PlacedBucket(bucket, words_W, held, {"flat": torch.randn(300_000, device=device())})
    placed.pack(1)
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    profile.start()
    placed.pack(1)
    placed.verify(1)
    placed.place()
    profile.stop()
    kernels = [event.name for event in profile.events() or () if event.device_type.name == "CUDA"]
    assert 0 < len(kernels) < 100, kernels

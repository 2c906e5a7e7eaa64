"""Syncs between ranks whose tensors lie on GPUs: by shared GPU memory, NCCL, or the host.

`mcore-rl doctor --gpu` checks syncs within one GPU; what takes more GPUs or the host is here.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from mcore_rl.device import has_cuda
from mcore_rl.tools.doctor import sync_checks
from mcore_rl.tools.doctor.check import Figures
from mcore_rl.tools.doctor.sync_ranks import run_scene
from mcore_rl.tools.doctor.toy_engine import Fault, Scene, SceneOutcome, column_cut, row_cut

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

GPU_MEMORY = Scene(row_cut, 1, 1, timeout_s=120, on_gpu=(True, True))
HOST = Scene(column_cut, 2, 2, timeout_s=120)
NCCL = replace(GPU_MEMORY, between_machines=True)
SCENES = [
    pytest.param(replace(GPU_MEMORY, bucket_bytes=1 << 20), id="large buckets"),
    pytest.param(replace(HOST, on_gpu=(True, False)), id="to the host"),
    pytest.param(replace(HOST, on_gpu=(False, True)), id="from the host"),
    pytest.param(
        replace(HOST, on_gpu=(True, False), num_senders=1, between_machines=True),
        id="to another host",
    ),
    pytest.param(NCCL, id="NCCL", marks=TWO_GPUS),
    pytest.param(replace(NCCL, num_senders=2, staged=True), id="NCCL, staged", marks=THREE_GPUS),
]


@pytest.mark.parametrize(
    "check",
    [
        sync_checks.check_in_place,
        sync_checks.check_after_release,
        sync_checks.check_cast_while_packed,
        sync_checks.check_staged,
        sync_checks.check_corrupt_byte,
        sync_checks.check_killed_sender,
        sync_checks.check_stopped_sender,
        sync_checks.check_kernels,
    ],
)
def test_the_doctors_checks_pass(check: Callable[[], Figures]) -> None:
    check()


@pytest.mark.parametrize("scene", SCENES)
def test_every_parameter_is_bit_for_bit_what_the_engines_own_loader_puts_there(
    scene: Scene,
) -> None:
    outcome = run_scene(scene)
    assert [report.error for report in outcome.reports] == [None] * len(outcome.reports)
    assert [received.differing for received in outcome.receivers] == [[]] * scene.num_receivers


@TWO_GPUS
def test_a_byte_changed_between_machines_is_refused_by_name() -> None:
    error = run_faulty("corrupt", timeout_s=60).receivers[0].reports[1].error
    assert error is not None and "has checksum" in error and "trainer rank 0" in error


@TWO_GPUS
@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_sender_on_another_machine_that_dies_or_hangs_is_named_by_the_deadline(kind: str) -> None:
    outcome = run_faulty(kind, timeout_s=30)
    report = outcome.receivers[0].reports[1]
    assert outcome.senders == [None]
    assert report.error is not None and "from trainer rank 0" in report.error
    assert report.seconds < 40


def run_faulty(kind: str, timeout_s: float) -> SceneOutcome:
    fault = Fault(rank=0, message=2, kind=kind)
    return run_scene(replace(NCCL, num_syncs=1, timeout_s=timeout_s, fault=fault))

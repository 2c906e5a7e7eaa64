"""Probes ask a GPU; each runs there, and its figures have the documented names."""

import pytest

from mcore_rl.device import has_cuda
from mcore_rl.tools.doctor.megatron_checks import (
    PROBES,
    check_memory_saver,
    check_nccl_abort,
    check_nccl_max_ctas,
)


def test_every_probe_needs_a_gpu() -> None:
    assert all(check.gpu for check in PROBES.checks)


@pytest.mark.gpu
@pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
def test_probes_answer_with_figures() -> None:
    assert check_nccl_max_ctas()["max_ctas"] > 0
    assert check_nccl_abort()["abort_s"] < 10
    pytest.importorskip("torch_memory_saver")
    assert check_memory_saver()["values_kept_with_copy"] is True

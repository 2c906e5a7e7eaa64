"""Questions to NCCL and to torch's allocators; all of them need a GPU."""

import pytest

from mcore_rl.device import has_cuda
from mcore_rl.device.probes import make_lone_group, measure_pinned_bytes, reduce_alone

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_cuda(), reason="needs a GPU")]


def test_a_group_of_one_reduces() -> None:
    assert reduce_alone(make_lone_group(max_ctas=2))


def test_pinning_takes_at_least_what_is_asked() -> None:
    assert measure_pinned_bytes(3 << 20) >= 3 << 20

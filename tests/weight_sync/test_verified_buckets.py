"""Verified buckets: the forwarding thread gets each bucket's checksums, or why there are none."""

import time
from threading import Timer

import pytest
import torch

from mcore_rl.weight_sync.execute import VerifiedBuckets
from mcore_rl.weight_sync.waits import TransferError


def test_a_bucket_is_waited_for_until_it_is_verified() -> None:
    verified = VerifiedBuckets()
    verified.add(torch.tensor([10]))
    late = Timer(0.05, verified.add, (torch.tensor([11, 12]),))
    late.start()
    deadline_s = time.monotonic() + 5
    assert verified.wait(1, deadline_s).tolist() == [11, 12]
    assert verified.wait(0, deadline_s).tolist() == [10]
    late.join()


def test_a_failure_ends_the_wait_for_later_buckets_only() -> None:
    verified = VerifiedBuckets()
    verified.add(torch.tensor([10]))
    late = Timer(0.05, verified.fail, ("a byte changed",))
    late.start()
    deadline_s = time.monotonic() + 5
    with pytest.raises(
        TransferError, match="bucket 1 cannot be forwarded: a byte changed"
    ) as caught:
        verified.wait(1, deadline_s)
    assert caught.value.peer_lost
    assert verified.wait(0, deadline_s).tolist() == [10]
    late.join()


def test_a_bucket_that_is_not_verified_by_the_deadline_is_an_error() -> None:
    with pytest.raises(TransferError, match="bucket 0 cannot be forwarded: the time is up"):
        VerifiedBuckets().wait(0, time.monotonic() + 0.01)

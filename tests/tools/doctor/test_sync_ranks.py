"""A faulty transport harms the message that it is told to, and no other."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mcore_rl.tools.doctor.sync_ranks import FaultyTransport
from mcore_rl.tools.doctor.toy_engine import Fault


class Kept:
    """A transport that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def send(self, tensor_u8: Tensor, peer: int, what: str, number: int = 0) -> None:
        self.sent.append(tensor_u8.clone())


def test_one_bit_of_one_message_changes() -> None:
    kept: Any = Kept()
    plan: Any = SimpleNamespace(buckets=[SimpleNamespace(peer=1)])
    faulty = FaultyTransport(kept, plan, Fault(rank=0, message=1, kind="corrupt"))
    for _ in range(3):
        faulty.send(torch.zeros(8, dtype=torch.uint8), 1, "a bucket")
    assert [int(tensor_u8.sum()) for tensor_u8 in kept.sent] == [0, 1, 0]

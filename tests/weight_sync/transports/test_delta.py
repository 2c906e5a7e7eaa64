"""Differences over gloo between two ranks in threads: exact, short, and sent whole if they err."""

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from mcore_rl.weight_sync.transports.delta import DeltaTransport
from mcore_rl.weight_sync.transports.gloo import GlooTransport
from mcore_rl.weight_sync.waits import TransferError
from tests.support.link_ends import make_link, open_ends, run_ranks

LENGTH = 576 * 100
NUM = 3
Pair = tuple[DeltaTransport, DeltaTransport]


@pytest.fixture
def pair() -> Iterator[Pair]:
    _store, link = make_link(timeout_s=20)
    ends = open_ends(link)
    sender, receiver = run_ranks([lambda e=end: DeltaTransport(GlooTransport(e)) for end in ends])
    yield sender, receiver
    for transport in (sender, receiver):
        transport.close()


def soon() -> float:
    return time.monotonic() + 20


def no_failure() -> None:
    return None


def move(pair: Pair, messages: list[Tensor]) -> list[Tensor]:
    """Send the messages of a version, one more under way than is waited for."""
    sender, receiver = pair
    received = [torch.zeros_like(message) for message in messages]

    def send() -> None:
        for number, message in enumerate(messages):
            sender.send(message, 1, f"bucket {number}", number)
            sender.run(soon(), no_failure, pending=1)
        sender.run(soon(), no_failure)

    def receive() -> None:
        for number, message in enumerate(received):
            receiver.recv(message, 0, f"bucket {number}", number)
            receiver.run(soon(), no_failure, pending=1)
        receiver.run(soon(), no_failure)

    run_ranks([send, receive])
    return received


def changed(messages: list[Tensor], share: float, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for message in messages:
        values = message.clone().view(torch.int16)
        values[torch.rand(len(values), generator=generator) < share] += 1
        made.append(values.view(torch.uint8))
    return made


def whole(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 256, (LENGTH,), generator=generator).to(torch.uint8) for _ in range(NUM)
    ]


def test_versions_arrive_exactly_and_most_bytes_stay(pair: Pair) -> None:
    """The first is whole; then little changes, much, all, little, nothing."""
    versions = [whole()]
    for number, share in enumerate((0.01, 0.3, 1.0, 0.01, 0.0)):
        versions.append(changed(versions[-1], share, number))
    saved = []
    for version in versions:
        received = move(pair, version)
        assert all(map(torch.equal, received, version))
        saved.append([transport.take_saved() for transport in pair][1] / (NUM * LENGTH))
    assert saved[0] == saved[3] == 0
    assert saved[1] > 0.9 and 0.5 < saved[2] < 0.8 and saved[4] > 0.9 and saved[5] > 0.9


def test_a_difference_that_gives_other_bytes_is_refused_and_sent_whole(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    first = whole()
    move(pair, first)
    kept = pair[1]._slots[0, 1].kept
    assert kept is not None
    kept[17] ^= 1
    second = changed(first, 0.01, 1)
    assert all(map(torch.equal, move(pair, second), second))
    assert "bucket 1: its difference gives other bytes than were sent" in caplog.text
    caplog.clear()
    third = changed(second, 0.01, 2)
    assert all(map(torch.equal, move(pair, third), third))
    assert not caplog.text, "the copies agree again"


def test_a_difference_of_what_was_never_sent_is_no_difference(pair: Pair) -> None:
    first = whole()
    move(pair, first)
    pair[1]._slots[0, 0].kept = None
    errors: list[str] = []

    def act(run: Callable[[], object]) -> None:
        try:
            run()
        except TransferError as error:
            errors.append(str(error))

    sender, receiver = pair
    received = torch.zeros(LENGTH, dtype=torch.uint8)
    receiver.recv(received, 0, "bucket 0", 0)
    sender.send(changed(first, 0.01, 1)[0], 1, "bucket 0", 0)
    act(lambda: receiver.run(soon(), no_failure))
    assert len(errors) == 1 and "bucket 0: no header of a difference" in errors[0]

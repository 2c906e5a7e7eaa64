"""The roster of a link: hosts by rank, one kind of checksum, and facts where both sides meet."""

from dataclasses import replace

import pytest

from mcore_rl.weight_sync.roster import RankFacts, Roster, make_roster
from mcore_rl.weight_sync.verify import ROWS, XXH3
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weight_sync.wire import Link

A, B, C = (RankFacts(machine, (XXH3, ROWS)) for machine in ("a", "b", "c"))
GPU_B = replace(B, gpu="gpu-b0")
GPU_C = replace(C, gpu="gpu-c0", readable_gpus=("gpu-c0", "gpu-c1"))


def make_link(num_senders: int, num_receivers: int = 2, delta: str = "off") -> Link:
    return Link("e", "", 0, "", num_senders, num_receivers, 1, 1.0, delta=delta)


@pytest.mark.parametrize(
    ("facts", "delta", "gloo"),
    [
        ([A, A], "off", False),
        ([A, B], "off", True),
        ([C, GPU_C], "off", False),
        ([A, GPU_C], "off", True),
        ([GPU_B, GPU_C], "auto", False),
        ([GPU_B, GPU_C], "always", True),
    ],
)
def test_all_ranks_know_whether_any_pair_uses_gloo(
    facts: list[RankFacts], delta: str, gloo: bool
) -> None:
    roster = make_roster(facts, make_link(1, 1, delta))
    assert roster.gloo == Roster.decode(roster.encode()).gloo == gloo


def test_hosts_are_numbered_over_both_sides_and_only_shared_ones_keep_facts() -> None:
    roster = make_roster([A, A, B, B, GPU_C], make_link(3))
    assert roster.hosts.expand() == (0, 0, 1, 1, 2)
    assert [roster.hosts[rank] for rank in range(5)] == [0, 0, 1, 1, 2]
    assert roster.on_gpu.expand() == (0, 0, 0, 0, 1)
    assert roster.met == {2: B, 3: B}
    assert roster.list_hosts(3).sources == (0, 0, 1)
    assert Roster.decode(roster.encode()) == roster


def test_all_that_a_rank_tells_arrives_at_the_ranks_of_its_host() -> None:
    engine = replace(GPU_C, memory="socket")
    trainer = replace(GPU_C, writes=True)
    roster = make_roster([trainer, engine], make_link(1, 1))
    assert Roster.decode(roster.encode()).met == {0: trainer, 1: engine}


def test_a_roster_grows_with_the_hosts_and_not_with_the_ranks() -> None:
    def encoded_bytes(num_hosts: int, ranks_per_host: int) -> int:
        facts = [
            RankFacts(f"host {host}", (XXH3,), f"gpu-{host}-{rank}")
            for host in range(num_hosts)
            for rank in range(ranks_per_host)
        ]
        return len(make_roster(facts, make_link(len(facts) - 8, 8)).encode())

    assert encoded_bytes(64, 32) < encoded_bytes(64, 8) + 16 * 32
    assert encoded_bytes(256, 8) < 2500


@pytest.mark.parametrize("theirs", [(XXH3, ROWS), (ROWS,), ("later", ROWS)])
def test_ranks_take_the_first_kind_of_checksum_that_all_compute(theirs: tuple[str, ...]) -> None:
    roster = make_roster([A, replace(B, sums=theirs)], make_link(1, 1))
    assert roster.sums == (XXH3 if XXH3 in theirs else ROWS)


def test_ranks_without_a_common_kind_of_checksum_are_named_once_per_kind() -> None:
    with pytest.raises(
        TransferError,
        match=r"no kind of checksum in common \(trainer rank 0: xxh3.*; rank 1 of engine e: later\)"
        r"; run one release",
    ):
        make_roster([A, A, B, B, replace(C, sums=("later",))], make_link(3))

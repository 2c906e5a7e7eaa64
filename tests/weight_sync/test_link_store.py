"""The store of a link: what ranks publish, how a wait for them ends, requests and reports."""

import asyncio
import socket
import time
from dataclasses import replace
from functools import partial
from threading import Thread, Timer

import pytest

from mcore_rl.weight_sync.link_store import FACTS, LinkStore
from mcore_rl.weight_sync.roster import RankFacts, Roster
from mcore_rl.weight_sync.store import client as client_module
from mcore_rl.weight_sync.store.messages import NONCE_BYTES, PROOF_BYTES, make_nonce, make_proof
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weight_sync.wire import Report, StageRequest
from tests.support.link_ends import make_link, run_ranks

NAMES = ("trainer rank 0", "trainer rank 1", "rank 0 of engine engine-0")


@pytest.fixture
def store() -> LinkStore:
    return LinkStore.serve("127.0.0.1", 5.0)


def collect(store: LinkStore, ranks: list[int], wait_s: float = 0.1) -> list[bytes]:
    return store.collect("layout", ranks, NAMES, NAMES[2], time.monotonic() + wait_s)


def test_published_data_comes_back_in_the_order_of_the_ranks_asked_for(store: LinkStore) -> None:
    for rank in range(3):
        store.publish("layout", rank, f"E{rank}".encode())
    assert collect(store, [2, 0, 1]) == [b"E2", b"E0", b"E1"]
    assert collect(store, []) == []


def test_a_wait_is_over_once_the_last_rank_has_published() -> None:
    store, link = make_link(timeout_s=5.0)
    store.publish("layout", 0, b"first")
    late = Timer(0.1, LinkStore.open(link).publish, ("layout", 1, b""))
    late.start()
    assert collect(store, [0, 1], wait_s=5.0) == [b"first", b""]
    late.join()


def test_ranks_that_do_not_publish_are_named_by_the_one_that_waited(store: LinkStore) -> None:
    store.publish("layout", 0, b"")
    with pytest.raises(
        TransferError,
        match=r"^rank 0 of engine engine-0 waited 0.\d s for the layout of trainer rank 1$",
    ) as caught:
        collect(store, [0, 1])
    assert caught.value.peer_lost


def test_the_failure_of_the_link_is_told_with_the_wait(store: LinkStore) -> None:
    store.fail("trainer rank 1: out of memory")
    with pytest.raises(TransferError, match="of trainer rank 1; trainer rank 1: out of memory"):
        collect(store, [1])


def test_an_error_is_published_in_place_of_data_and_raised_at_both_ends(store: LinkStore) -> None:
    with (
        pytest.raises(ValueError, match="no such tensor"),
        store.publish_errors("layout", 1, NAMES[1]),
    ):
        raise ValueError("no such tensor")
    store.publish("layout", 0, b"")
    with pytest.raises(TransferError, match="trainer rank 1 failed: no such tensor") as caught:
        collect(store, [0, 1])
    assert caught.value.peer_lost
    with store.publish_errors("layout", 2, NAMES[2]):
        store.publish("layout", 2, b"fine")
    assert collect(store, [2]) == [b"fine"]


def test_what_was_joined_wakes_the_ranks_that_wait_for_it() -> None:
    store, link = make_link(num_senders=2, timeout_s=20.0)
    ranks = [LinkStore.open(link) for _ in NAMES]

    def act(rank: int) -> bytes:
        time.sleep(0.2 * rank)
        facts = RankFacts("host", ("sum",), gpu=str(rank))
        ranks[rank].publish(FACTS, rank, facts.encode())
        return ranks[rank].wait_joined(FACTS, NAMES, NAMES[rank], time.monotonic() + 20)

    began_s = time.monotonic()
    encoded = set(run_ranks([partial(act, rank) for rank in range(len(NAMES))]))
    assert time.monotonic() - began_s < 2.0
    (roster,) = map(Roster.decode, encoded)
    assert [roster.met[rank].gpu for rank in range(3)] == ["0", "1", "2"]
    assert store.num_keys == 1


def test_a_wait_for_all_names_the_ranks_that_are_late(store: LinkStore) -> None:
    store.publish(FACTS, 0, b"")
    names = [*NAMES[:2], *(f"rank {rank} of engine engine-0" for rank in range(20))]
    with pytest.raises(
        TransferError,
        match=r"^trainer rank 0 waited 0.\d s for the facts of trainer rank 1, rank 0 of engine"
        r" engine-0, .*rank 14 of engine engine-0 and 5 more ranks$",
    ):
        store.wait_joined(FACTS, names, NAMES[0], time.monotonic() + 0.1)


def test_an_error_of_one_rank_ends_the_wait_of_all_before_the_others_have_published(
    store: LinkStore,
) -> None:
    store.publish_error(FACTS, 1, NAMES[1], "no GPU")
    with pytest.raises(TransferError, match=r"^trainer rank 1 failed: no GPU$"):
        store.wait_joined(FACTS, NAMES, NAMES[0], time.monotonic() + 20)
    with pytest.raises(TransferError, match=r"^trainer rank 1 failed: no GPU$"):
        asyncio.run(store.wait_joined_async(FACTS, NAMES, "the controller", time.monotonic() + 20))


def shake_hands(listener: socket.socket, key: str) -> None:
    """Be a store that knows the key, and then answers nothing for two seconds."""
    with listener.accept()[0] as client:
        nonce = make_nonce()
        client.sendall(nonce)
        client_nonce = client.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)[:NONCE_BYTES]
        client.sendall(make_proof(key, "server", nonce, client_nonce))
        time.sleep(2.0)


def test_a_wait_for_a_request_ends_when_the_controller_no_longer_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, link = make_link()
    monkeypatch.setattr(client_module, "LONGEST_WAIT_S", 0.2)
    monkeypatch.setattr(client_module, "_SLOW_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        going_silent = Thread(target=shake_hands, args=(listener, link.store_key))
        going_silent.start()
        with pytest.raises(
            TransferError,
            match=r"^rank 0 of engine engine-0 waited 0.\d s for the controller to request weights"
            r" \(number 3\), and it no longer answers: the store at 127.0.0.1:\d+: timed out$",
        ):
            LinkStore.open(replace(link, store_port=port)).wait_stage_request(3, NAMES[2])
        going_silent.join()
    waiting = LinkStore.open(link)
    ending = Timer(0.2, store._served.close)
    ending.start()
    with pytest.raises(TransferError, match=r"number 0\), and it no longer answers: .*hung up"):
        waiting.wait_stage_request(0, NAMES[2])
    ending.join()


def test_the_first_failure_is_the_one_that_all_ranks_are_told(store: LinkStore) -> None:
    assert store.failure() is None
    assert store.fail("first") == "first"
    assert store.fail("second") == "first"
    assert store.failure() == "first"


def test_a_store_that_is_gone_is_a_failure() -> None:
    server, link = make_link(timeout_s=1.0)
    client = LinkStore.open(link)
    client.publish("layout", 0, b"")
    assert server.port == link.store_port
    del server
    failure = client.failure()
    assert failure is not None and "the controller's store is gone" in failure
    assert client.fail("own error") == "own error"


def test_stage_requests_are_read_by_number_and_leave_no_keys(store: LinkStore) -> None:
    _held, link = make_link()
    requests = [StageRequest(7), StageRequest(8, receive_link=link)]
    num_keys = store.num_keys
    for number, request in enumerate(requests):
        store.put_stage_request(number, request)
    assert store.wait_stage_request(1, NAMES[2]) == requests[1]
    assert store.wait_stage_request(0, NAMES[2]) == requests[0]
    for number in range(2):
        store.drop_stage_request(number)
    assert store.num_keys == num_keys


def test_a_report_is_taken_once(store: LinkStore) -> None:
    assert store.take_report("swap", 2) is None
    store.put_report("swap", 2, Report(NAMES[2], error="no"))
    assert store.take_report("receive", 2) is None
    assert store.take_report("swap", 2) == Report(NAMES[2], error="no")
    assert store.take_report("swap", 2) is None

"""The store of a link: what ranks publish, how a wait for them ends, requests and reports."""

import time
from threading import Timer

import pytest

from mcore_rl.stream.link_store import LinkStore
from mcore_rl.stream.routes.transport import TransferError
from mcore_rl.stream.wire import Report, StageRequest
from tests.support.link_ends import make_link

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
        store.errors_published("layout", 1),
    ):
        raise ValueError("no such tensor")
    store.publish("layout", 0, b"")
    with pytest.raises(TransferError, match="trainer rank 1 failed: no such tensor") as caught:
        collect(store, [0, 1])
    assert caught.value.peer_lost
    with store.errors_published("layout", 2):
        store.publish("layout", 2, b"fine")
    assert collect(store, [2]) == [b"fine"]


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
    assert store.wait_stage_request(1) == requests[1]
    assert store.wait_stage_request(0) == requests[0]
    for number in range(2):
        store.drop_stage_request(number)
    assert store.num_keys == num_keys


def test_a_report_is_taken_once(store: LinkStore) -> None:
    assert store.take_report("swap", 2) is None
    store.put_report("swap", 2, Report(NAMES[2], error="no"))
    assert store.take_report("receive", 2) is None
    assert store.take_report("swap", 2) == Report(NAMES[2], error="no")
    assert store.take_report("swap", 2) is None

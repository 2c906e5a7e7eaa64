"""Serves one link's key-value store, and joins the values that the link's ranks publish.

ranks publish              once all have          all ranks read one value
facts of themselves   -->  make_roster       -->  the roster
answers to the plan   -->  join_answers      -->  agreed, or why ranks list their shards, or an
                                                  error that names two ranks

Each rank publishes once and reads once per topic, whatever the number of ranks. The call that
publishes the last value also joins all values, so nobody polls. The store also holds failures,
stage requests and reports.

The controller serves each link's store on a port of its own. The store and its contents end with
the link. Only processes with the link, and so with the store's random key, can connect.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mcore_rl.process.errors import describe_error
from mcore_rl.weight_sync.roster import RankFacts, make_roster
from mcore_rl.weight_sync.store.client import (
    Client,
    LocalClient,
    RemoteClient,
    StoreLostError,
    TorchStore,
)
from mcore_rl.weight_sync.store.messages import LENGTH
from mcore_rl.weight_sync.store.server import LONGEST_WAIT_S, StoreServer, Values
from mcore_rl.weight_sync.waits import FAILURE_POLL_S, TransferError
from mcore_rl.weight_sync.wire import (
    Action,
    Link,
    Report,
    StageRequest,
    decode_report,
    decode_stage_request,
    encode_report,
    encode_stage_request,
)

_log = logging.getLogger(__name__)

FACTS = "facts"
RECORDED_PLAN = "recorded plan"
LISTED_PLAN = "listed plan"
DATA = b"D"
ERROR = b"E"
"""First byte of a published value: data follows, or the error that kept a rank from its data."""
_PAIR = np.dtype([("peer", "<u4"), ("digest", ">u8")])
"""A rank's peer and 64 bits of the digest of their slices, which tell plans apart."""
_DIGEST_LEN = 16
"""Hex digits of these 64 bits."""

Join = Callable[[Sequence[bytes]], bytes]


@dataclass(frozen=True)
class PlanAnswer:
    """A rank's answer once it has planned its part.

    problem  why the recorded layouts don't hold for the rank; empty if they do
    pairs    _PAIR [peers]: each peer, and the digest of the slices between peer and rank
    """

    problem: str
    pairs: bytes = b""

    @staticmethod
    def make(digests: Mapping[int, str]) -> "PlanAnswer":
        """Return the answer of a rank, given peer -> digest in hex."""
        pairs = [(peer, int(digest[:_DIGEST_LEN], 16)) for peer, digest in digests.items()]
        return PlanAnswer("", np.array(pairs, _PAIR).tobytes())

    @property
    def digests(self) -> dict[int, str]:
        """Peer -> the digest's first hex digits."""
        pairs: list[tuple[int, int]] = np.frombuffer(self.pairs, _PAIR).tolist()
        return {peer: f"{digest:0{_DIGEST_LEN}x}" for peer, digest in pairs}

    def encode(self) -> bytes:
        problem = self.problem.encode()
        return LENGTH.pack(len(problem)) + problem + self.pairs

    @staticmethod
    def decode(data: bytes) -> "PlanAnswer":
        at = LENGTH.size + LENGTH.unpack_from(data)[0]
        return PlanAnswer(data[LENGTH.size : at].decode(), data[at:])


def make_rank_key(topic: str, rank: int) -> str:
    """Return the key under which a rank publishes."""
    return f"{topic}/{rank}"


def make_joined_key(topic: str) -> str:
    """Return the key of the value that was joined from those of all ranks."""
    return f"{topic} of all"


def keep_link(values: Values, link: Link) -> None:
    """Have `values` join each topic once the last rank of the link has published."""
    names = link.names

    def join_facts(encoded: Sequence[bytes]) -> bytes:
        facts = [RankFacts.decode(data) for data in encoded]
        return make_roster(facts, link).encode()

    def join_plans(encoded: Sequence[bytes]) -> bytes:
        problems = join_answers([PlanAnswer.decode(data) for data in encoded], names)
        if problems:
            _join_topic(values, LISTED_PLAN, names, join_plans)
        return problems.encode()

    _join_topic(values, FACTS, names, join_facts)
    _join_topic(values, RECORDED_PLAN, names, join_plans)


def join_answers(answers: Sequence[PlanAnswer], names: Sequence[str]) -> str:
    """Return why ranks must list their shards, or "" if all ranks made one plan.

    Raises TransferError, which names two ranks that planned different slices for their pair.
    """
    problems = [
        f"{names[rank]}: {answer.problem}" for rank, answer in enumerate(answers) if answer.problem
    ]
    if problems:
        more = f"; and {len(problems) - 4} more ranks" if len(problems) > 4 else ""
        return "; ".join(problems[:4]) + more
    if _are_agreed(answers):
        return ""
    digests = [answer.digests for answer in answers]
    for rank, peer in ((rank, peer) for rank, own in enumerate(digests) for peer in own):
        first, second = sorted((rank, peer))
        of_first, of_second = digests[first].get(second), digests[second].get(first)
        if of_first != of_second:
            raise TransferError(
                f"{names[first]} and {names[second]} made different plans for their pair:"
                f" {of_first}, {of_second}"
            )
    raise AssertionError("digests differ, but not those of a pair")


def _are_agreed(answers: Sequence[PlanAnswer]) -> bool:
    """Return whether both ranks of each pair gave the same digest."""
    told = np.frombuffer(b"".join(answer.pairs for answer in answers), _PAIR)
    counts = [len(answer.pairs) // _PAIR.itemsize for answer in answers]
    ranks = np.repeat(np.arange(len(answers)), counts)
    peers = told["peer"].astype(np.int64)
    pairs = np.minimum(ranks, peers) * len(answers) + np.maximum(ranks, peers)
    order = np.lexsort((ranks, pairs))
    if len(order) % 2:
        return False
    firsts, seconds = order[::2], order[1::2]
    return bool(
        (pairs[firsts] == pairs[seconds]).all()
        and (ranks[firsts] != ranks[seconds]).all()
        and (told["digest"][firsts] == told["digest"][seconds]).all()
    )


def _join_topic(values: Values, topic: str, names: Sequence[str], join: Join) -> None:
    keys = [make_rank_key(topic, rank) for rank in range(len(names))]

    def on_present() -> None:
        published = values.take_all(keys)
        values.compare_set(make_joined_key(topic), b"", _join(published, names, join))

    values.when_present(keys, on_present)


def _join(published: Sequence[bytes], names: Sequence[str], join: Join) -> bytes:
    for rank, value in enumerate(published):
        if value[:1] == ERROR:
            return ERROR + f"{names[rank]} failed: {value[1:].decode()}".encode()
    try:
        return DATA + join([value[1:] for value in published])
    except (TransferError, ValueError, KeyError) as error:
        return ERROR + str(error).encode()


_FAILURE = "failure"
_FAILURE_POLL_S = 5.0
"""How often a wait for keys checks whether the link has failed."""
_MAX_NAMES = 16
"""The most ranks that an error names."""


class LinkStore:
    """One process's client of a link's store; use each from one thread."""

    def __init__(self, client: Client, timeout_s: float, server: StoreServer | None) -> None:
        self.client = client
        self._timeout_s = timeout_s
        self._server = server

    @staticmethod
    def serve(host: str, timeout_s: float) -> "LinkStore":
        """Start a store with a random key on a free port of `host`, and at that address only.

        The store ends with the returned object.
        """
        server = StoreServer(host)
        return LinkStore(LocalClient(server), timeout_s, server)

    @staticmethod
    def open(link: Link) -> "LinkStore":
        """Return a client of the link's store; it connects when it is first used."""
        client = RemoteClient(link.store_host, link.store_port, link.store_key)
        return LinkStore(client, link.timeout_s, None)

    @property
    def port(self) -> int:
        """The port at which this process serves the store."""
        return self._served.port

    @property
    def key(self) -> str:
        """The secret that a process must know to connect."""
        return self._served.key

    @property
    def _served(self) -> StoreServer:
        assert self._server is not None, "another process serves this store"
        return self._server

    @property
    def num_keys(self) -> int:
        return self.client.count()

    def make_torch_store(self) -> Any:
        """Return this store as a torch store, at which a process group can meet."""
        return TorchStore(self.client, self._timeout_s)

    def keep(self, link: Link) -> None:
        """Join the values that the ranks of `link` publish; see the module's picture."""
        keep_link(self._served.values, link)

    def publish(self, topic: str, rank: int, data: bytes) -> None:
        """Publish this rank's `data` on `topic` to all ranks of the link."""
        self.client.set(make_rank_key(topic, rank), DATA + data)

    def publish_tagged(self, topic: str, values: Sequence[bytes]) -> None:
        """Publish for the first ranks; a value is DATA and data, or ERROR and a message.

        Only in the process that serves the store.
        """
        keyed = {make_rank_key(topic, rank): value for rank, value in enumerate(values)}
        self._served.values.set_all(keyed)

    def publish_error(self, topic: str, rank: int, name: str, message: str) -> None:
        """Publish that rank `name` failed, in place of its data; then no rank waits for others."""
        self.client.set(make_rank_key(topic, rank), ERROR + message.encode())
        self.client.compare_set(
            make_joined_key(topic), b"", ERROR + f"{name} failed: {message}".encode()
        )

    @contextmanager
    def publish_errors(self, topic: str, rank: int, name: str) -> Iterator[None]:
        """Publish an error of the block in place of this rank's data, so that no rank waits."""
        try:
            yield
        except Exception as error:
            self.publish_error(topic, rank, name, str(error))
            raise

    def collect(
        self,
        topic: str,
        ranks: Sequence[int],
        names: Sequence[str],
        waiting: str,
        deadline_s: float,
    ) -> list[bytes]:
        """Return the data that each of `ranks` published on `topic`, in order.

        Waits until time.monotonic() passes `deadline_s` or a rank of the link fails; `waiting` is
        the name of the rank that waits. Raises TransferError if a rank published an error, or has
        not published by then; `names` are the ranks' names for the message.
        """
        keys = [make_rank_key(topic, rank) for rank in ranks]
        began_s = time.monotonic()
        while not self.client.wait(keys, min(_FAILURE_POLL_S, deadline_s - time.monotonic())):
            self._check_wait(topic, ranks, names, waiting, began_s, deadline_s)
        values = self.client.get_all(keys)
        for rank, value in zip(ranks, values, strict=True):
            if value[:1] == ERROR:
                raise TransferError(f"{names[rank]} failed: {value[1:].decode()}", peer_lost=True)
        return [value[1:] for value in values]

    def wait_joined(
        self, topic: str, names: Sequence[str], waiting: str, deadline_s: float
    ) -> bytes:
        """Return the value that was joined from those of all ranks on `topic`.

        `names` are the ranks' names. Waits and fails as `collect` does, but with a single request.
        """
        key = make_joined_key(topic)
        began_s = time.monotonic()
        while True:
            value = self.client.fetch(key, min(_FAILURE_POLL_S, deadline_s - time.monotonic()))
            if value is not None:
                return _untag(value)
            self._check_wait(topic, range(len(names)), names, waiting, began_s, deadline_s)

    async def wait_joined_async(
        self, topic: str, names: Sequence[str], waiting: str, deadline_s: float
    ) -> bytes:
        """Wait as `wait_joined` does without blocking the event loop.

        Only in the process that serves the store.
        """
        key = make_joined_key(topic)
        began_s = time.monotonic()
        while not await self.wait_present([key], FAILURE_POLL_S):
            self._check_wait(topic, range(len(names)), names, waiting, began_s, deadline_s)
        (value,) = self.client.get_all([key])
        return _untag(value)

    async def wait_present(self, keys: Sequence[str], seconds: float) -> bool:
        """Return whether all of `keys` are set within `seconds`.

        Only in the process that serves the store. The call that sets the last key wakes the waiting
        coroutine.
        """
        loop = asyncio.get_running_loop()
        present = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # The loop has ended.
                loop.call_soon_threadsafe(present.set)

        values = self._served.values
        waiter = values.when_present(keys, wake)
        if waiter is None:
            return True
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await present.wait()
            return True
        except TimeoutError:
            return False
        finally:
            values.forget(waiter)

    def _check_wait(
        self,
        topic: str,
        ranks: Sequence[int],
        names: Sequence[str],
        waiting: str,
        began_s: float,
        deadline_s: float,
    ) -> None:
        """Raise TransferError, which names the missing ranks, if a wait must end."""
        failure = self.failure()
        if failure is None and time.monotonic() < deadline_s:
            return
        missing = set(self.client.list_missing([make_rank_key(topic, rank) for rank in ranks]))
        late = [names[rank] for rank in ranks if make_rank_key(topic, rank) in missing]
        shown = ", ".join(late[:_MAX_NAMES])
        if len(late) > _MAX_NAMES:
            shown += f" and {len(late) - _MAX_NAMES} more ranks"
        waited_s = time.monotonic() - began_s
        message = f"{waiting} waited {waited_s:.1f} s for the {topic} of {shown}"
        raise TransferError(message + (f"; {failure}" if failure else ""), peer_lost=True)

    def fail(self, message: str) -> str:
        """Mark the link as failed for all its ranks; return the first failure of any rank.

        Returns `message` if the store is gone.
        """
        try:
            return self.client.compare_set(_FAILURE, b"", message.encode()).decode()
        except RuntimeError:
            return message

    def failure(self) -> str | None:
        """Return the first failure that a rank reported, or None; a lost store is a failure."""
        try:
            message = self.client.get(_FAILURE)
            return None if message is None else message.decode()
        except RuntimeError as error:
            return f"the controller's store is gone ({error})"

    def put_stage_request(self, number: int, request: StageRequest) -> None:
        """Put a request for the engine's ranks; requests are numbered from 0."""
        self.client.set(_make_request_key(number), encode_stage_request(request))

    def wait_stage_request(self, number: int, waiting: str) -> StageRequest:
        """Return request `number`, for which rank `waiting` waits while the trainer computes.

        The wait has no deadline, because steps may be long, but the store answers every few
        seconds. Raises TransferError if the store is silent for longer than a client waits for an
        answer. Blocks every other use of this object.
        """
        key = _make_request_key(number)
        began_s = time.monotonic()
        try:
            while True:
                data = self.client.fetch(key, LONGEST_WAIT_S)
                if data is not None:
                    return decode_stage_request(data)
        except StoreLostError as error:
            waited_s = time.monotonic() - began_s
            raise TransferError(
                f"{waiting} waited {waited_s:.1f} s for the controller to request weights (number"
                f" {number}), and it no longer answers: {error}",
                peer_lost=True,
            ) from error

    def drop_stage_request(self, number: int) -> None:
        self.client.delete(_make_request_key(number))

    def put_report(self, action: Action, rank: int, report: Report) -> None:
        self.client.set(make_report_key(action, rank), encode_report(report))

    def has_error(self, action: Action, ranks: Sequence[int]) -> bool:
        """Return whether a rank has reported an error."""
        found = (self.client.get(make_report_key(action, rank)) for rank in ranks)
        return any(decode_report(data).error for data in found if data is not None)

    def take_report(self, action: Action, rank: int) -> Report | None:
        """Remove and return the report of a rank; return None if the rank has not reported."""
        key = make_report_key(action, rank)
        report = self.client.get(key)
        if report is None:
            return None
        self.client.delete(key)
        return decode_report(report)


def _untag(value: bytes) -> bytes:
    """Return the joined data. Raises TransferError if a rank published an error."""
    if value[:1] == ERROR:
        raise TransferError(value[1:].decode(), peer_lost=True)
    return value[1:]


def _make_request_key(number: int) -> str:
    return f"stage/{number}"


def make_report_key(action: Action, rank: int) -> str:
    return f"report/{action}/{rank}"


@torch.no_grad()
def report_outcome(name: str, act: Callable[[], Report]) -> Report:
    """Call `act` and return its report; log an error and return it as the report of rank `name`."""
    began_s = time.monotonic()
    try:
        return act()
    except TransferError as error:
        _log.exception("weight sync failed on %s", name)
        message = str(error)
        peer_lost = error.peer_lost
    except Exception as error:
        _log.exception("weight sync failed on %s", name)
        message = describe_error(error)
        peer_lost = False
    return Report(name, seconds=time.monotonic() - began_s, error=message, peer_lost=peer_lost)


def publish_report(store: LinkStore, action: Action, rank: int, report: Report) -> bool:
    """Put `report` for the controller; return False if the store is gone."""
    try:
        store.put_report(action, rank, report)
    except RuntimeError:
        _log.exception("the controller's store is gone; this report is lost: %s", report)
        return False
    return True

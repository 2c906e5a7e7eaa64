"""Joins what the ranks of a link publish, in the process that serves its store.

ranks publish              once all have          all ranks read one value
facts of themselves   -->  make_roster       -->  the roster
answers to the plan   -->  join_answers      -->  agreed, or why ranks list their shards, or an
                                                  error that names two ranks

So each rank publishes once and reads once per topic, whatever the number of ranks. The call that
publishes the last value also joins all of them: nobody polls.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mcore_rl.weight_sync.roster import RankFacts, make_roster
from mcore_rl.weight_sync.store.messages import LENGTH
from mcore_rl.weight_sync.store.values import Values
from mcore_rl.weight_sync.transports.transport import TransferError
from mcore_rl.weight_sync.wire import Link

FACTS = "facts"
RECORDED_PLAN = "recorded plan"
LISTED_PLAN = "listed plan"
DATA = b"D"
ERROR = b"E"
"""First byte of a published value: either data or the error that kept a rank from publishing data.
"""
_PAIR = np.dtype([("peer", "<u4"), ("digest", ">u8")])
"""A rank tells this of each of its pairs: 64 bits of a digest tell plans apart."""
_DIGEST_LEN = 16
"""Hex digits of these 64 bits."""

Join = Callable[[Sequence[bytes]], bytes]


@dataclass(frozen=True)
class PlanAnswer:
    """A rank's answer once it has planned its part.

    problem  why the recorded layouts don't hold for the rank; empty if they do
    pairs    _PAIR [peers]: each peer, and digest of the slices that travel between it and the rank
    """

    problem: str
    pairs: bytes = b""

    @staticmethod
    def of(digests: Mapping[int, str]) -> "PlanAnswer":
        """Return the answer of a rank, given peer -> digest in hex."""
        pairs = [(peer, int(digest[:_DIGEST_LEN], 16)) for peer, digest in digests.items()]
        return PlanAnswer("", np.array(pairs, _PAIR).tobytes())

    @property
    def digests(self) -> dict[int, str]:
        """Peer -> the first hex digits of the digest."""
        pairs: list[tuple[int, int]] = np.frombuffer(self.pairs, _PAIR).tolist()
        return {peer: f"{digest:0{_DIGEST_LEN}x}" for peer, digest in pairs}

    def encode(self) -> bytes:
        problem = self.problem.encode()
        return LENGTH.pack(len(problem)) + problem + self.pairs

    @staticmethod
    def decode(data: bytes) -> "PlanAnswer":
        at = LENGTH.size + LENGTH.unpack_from(data)[0]
        return PlanAnswer(data[LENGTH.size : at].decode(), data[at:])


def rank_key(topic: str, rank: int) -> str:
    """Return the key under which a rank publishes."""
    return f"{topic}/{rank}"


def joined_key(topic: str) -> str:
    """Return the key of what was joined from the values of all ranks."""
    return f"{topic} of all"


def keep_link(values: Values, link: Link) -> None:
    """Join each topic of the link's ranks in `values` once the last of them has published."""
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
    """Return why ranks list their shards, or "" if all ranks made one plan.

    Raises TransferError, which names both ranks of a pair that planned different slices.
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
    keys = [rank_key(topic, rank) for rank in range(len(names))]

    def on_present() -> None:
        published = values.take_all(keys)
        values.compare_set(joined_key(topic), b"", _join(published, names, join))

    values.when_present(keys, on_present)


def _join(published: Sequence[bytes], names: Sequence[str], join: Join) -> bytes:
    for rank, value in enumerate(published):
        if value[:1] == ERROR:
            return ERROR + f"{names[rank]} failed: {value[1:].decode()}".encode()
    try:
        return DATA + join([value[1:] for value in published])
    except (TransferError, ValueError, KeyError) as error:
        return ERROR + str(error).encode()

"""Joins what the ranks of a link publish, in the process that serves its store.

ranks publish              once all have          all ranks read one value
facts of themselves   -->  make_roster       -->  the roster
answers to the plan   -->  join_answers      -->  agreed, or why ranks list their shards, or an
                                                  error that names two ranks

So each rank publishes once and reads once per topic, whatever the number of ranks. The call that
publishes the last value also joins all of them: nobody polls.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.stream.roster import RankFacts, make_roster
from mcore_rl.stream.routes.transport import TransferError
from mcore_rl.stream.store.values import Values
from mcore_rl.stream.wire import Link

FACTS = "facts"
RECORDED_PLAN = "recorded plan"
LISTED_PLAN = "listed plan"
DATA = b"D"
ERROR = b"E"
"""First byte of a published value: either data or the error that kept a rank from publishing data.
"""
_DIGEST_LEN = 16
"""Hex digits of a pair's digest that are compared: 64 bits tell plans apart."""

Join = Callable[[Sequence[bytes]], bytes]


@dataclass(frozen=True)
class PlanAnswer:
    """A rank's answer once it has planned its part.

    problem  why the recorded layouts don't hold for the rank; empty if they do
    digests  peer -> digest of the slices that travel between it and the rank
    """

    problem: str
    digests: Mapping[int, str]

    @staticmethod
    def of(digests: Mapping[int, str]) -> "PlanAnswer":
        return PlanAnswer("", {peer: digest[:_DIGEST_LEN] for peer, digest in digests.items()})

    def encode(self) -> bytes:
        return json.dumps([self.problem, self.digests]).encode()

    @staticmethod
    def decode(data: bytes) -> "PlanAnswer":
        problem, digests = json.loads(data)
        return PlanAnswer(problem, {int(peer): digest for peer, digest in digests.items()})


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
        f"{name}: {answer.problem}"
        for name, answer in zip(names, answers, strict=True)
        if answer.problem
    ]
    if problems:
        more = f"; and {len(problems) - 4} more ranks" if len(problems) > 4 else ""
        return "; ".join(problems[:4]) + more
    for rank, answer in enumerate(answers):
        for peer, digest in answer.digests.items():
            theirs = answers[peer].digests.get(rank)
            if theirs != digest:
                first, second = sorted((rank, peer))
                raise TransferError(
                    f"{names[first]} and {names[second]} made different plans for their pair:"
                    f" {answers[first].digests.get(second)}, {answers[second].digests.get(first)}"
                )
    return ""


def _join_topic(values: Values, topic: str, names: Sequence[str], join: Join) -> None:
    keys = [rank_key(topic, rank) for rank in range(len(names))]

    def on_present() -> None:
        published = values.take_all(keys)
        values.compare_set(joined_key(topic), b"", _join(published, names, join))

    values.when_present(keys, on_present)


def _join(published: Sequence[bytes], names: Sequence[str], join: Join) -> bytes:
    for name, value in zip(names, published, strict=True):
        if value[:1] == ERROR:
            return ERROR + f"{name} failed: {value[1:].decode()}".encode()
    try:
        return DATA + join([value[1:] for value in published])
    except (TransferError, ValueError, KeyError) as error:
        return ERROR + str(error).encode()

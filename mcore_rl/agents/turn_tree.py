"""The turns of an episode as an append-only tree, and the rows of tokens that train it.

    turn 0: | whole conversation | answer |
    turn 1:                               | appended | answer |            parent 0: one row
    turn 2: | whole, earlier reasoning left out      | answer |            a fork: another row

A turn's tokens follow those of its parent, literally. A turn without a parent lays its conversation
out anew. Nothing is ever realigned: what the engine was given and what it sampled is what trains.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from mcore_rl.agents.messages import Answer, Message, Tool
from mcore_rl.batches.episodes import spans_of
from mcore_rl.types import PromptImage, Row, TurnRecord, VersionSpan


class Fork(StrEnum):
    """Why a turn does not simply continue the one before."""

    NONE = ""
    TEMPLATE = "template"
    """The chat template rewrites what came before, such as reasoning that it leaves out."""
    HISTORY = "history"
    """Whoever drives the episode rewrote the conversation, such as a summary of its beginning."""
    SUB_AGENT = "sub_agent"
    """Another conversation, or the same one with other tools or of another adapter."""
    RETRY = "retry"
    """The same request again."""
    BRANCH = "branch"
    """Another continuation of a turn that was continued already."""


@dataclass(frozen=True)
class Turn:
    """One answer of the policy or of another adapter, and the tokens that led to it.

    parent           the turn whose tokens come before; None: context_ids are the whole context
    messages         what was said since the parent's answer; all, if there is no parent
    context_ids      tokens between the parent's answer and this one
    token_ids        the answer as it was sampled
    versions         in positions of token_ids
    routed_experts   int16 [context and answer but its last token - start, L, K], of tokens from
                     `experts_start` of the whole context on; None if they were not asked for
    indexer_topk     the chosen keys of the same tokens, as in Sample, by position in the context
    images           those that context_ids shows, in order
    engines          numbers of the engines that drew the answer, in order
    adapter          what answered in the place of the policy; empty: the policy
    """

    number: int
    parent: int | None
    fork: Fork
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    context_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finish_reason: str
    answer: Answer
    routed_experts: Tensor | None = None
    indexer_topk: Tensor | None = None
    experts_start: int = 0
    reward: float = 0.0
    images: tuple[PromptImage, ...] = ()
    engines: tuple[int, ...] = ()
    adapter: str = ""

    @property
    def is_trained(self) -> bool:
        """Return whether the policy sampled tokens in it."""
        return bool(self.token_ids) and not self.adapter

    @property
    def new_ids(self) -> tuple[int, ...]:
        return self.context_ids + self.token_ids


@dataclass
class TurnTree:
    """The turns of one episode, in the order in which they were sampled."""

    turns: list[Turn] = field(default_factory=list)

    def add(self, turn: Turn) -> None:
        """Append a turn, whose number must be the next."""
        assert turn.number == len(self.turns), (turn.number, len(self.turns))
        assert turn.parent is None or turn.parent < turn.number, turn.parent
        self.turns.append(turn)

    def add_reward(self, number: int, reward: float) -> None:
        turn = self.turns[number]
        self.turns[number] = replace(turn, reward=turn.reward + reward)

    def path(self, number: int) -> list[Turn]:
        """Return the turns whose tokens make the row that ends with a turn, in order."""
        turns = [self.turns[number]]
        while turns[-1].parent is not None:
            turns.append(self.turns[turns[-1].parent])
        turns.reverse()
        return turns

    def path_ids(self, number: int) -> tuple[int, ...]:
        """Return all tokens up to and with a turn's answer."""
        parts = [ids for turn in self.path(number) for ids in (turn.context_ids, turn.token_ids)]
        return tuple(chain.from_iterable(parts))

    def path_images(self, number: int) -> tuple[PromptImage, ...]:
        """Return the images that `path_ids` shows, in order."""
        return images_of(self.path(number))

    def conversation(self, number: int) -> list[Message]:
        """Return all messages up to and with a turn's answer."""
        return [
            message
            for turn in self.path(number)
            for message in (*turn.messages, turn.answer.message)
        ]

    def records(self) -> tuple[TurnRecord, ...]:
        return tuple(map(_record, self.turns))


Cut = Callable[[TurnTree], Sequence[int]]
"""Returns the turns that end the rows; each turn must be on the path to one of them."""


def at_leaves(tree: TurnTree) -> list[int]:
    """Return the turns that nothing continues: the fewest rows."""
    continued = {turn.parent for turn in tree.turns}
    return [turn.number for turn in tree.turns if turn.number not in continued]


def at_turns(tree: TurnTree) -> list[int]:
    """Return all turns: a row for each, as systems have that cannot join turns."""
    return [turn.number for turn in tree.turns]


def rows_of(tree: TurnTree, cut: Cut = at_leaves) -> tuple[Row, ...]:
    """Return rows that train each sampled token once, whatever the cut.

    A turn on several rows is trained in the first of them, and context in the others. Turns that
    sampled nothing, and those of other adapters, train nothing; a row that trains nothing is left
    out.
    """
    trained: set[int] = set()
    rows = []
    for end in cut(tree):
        path = tree.path(end)
        own = [turn.number for turn in path if turn.is_trained and turn.number not in trained]
        if own:
            rows.append(_row(path, own))
            trained.update(own)
    sampled = {turn.number for turn in tree.turns if turn.is_trained}
    assert trained == sampled, f"rows train turns {trained} of {sampled}"
    return tuple(rows)


def _row(path: Sequence[Turn], own: Sequence[int]) -> Row:
    token_ids = np.array([token for turn in path for token in turn.new_ids], np.int32)
    logprobs = np.zeros(len(token_ids), np.float32)
    turn_T = np.full(len(token_ids), -1, np.int16)
    version_T = np.full(len(token_ids), -1, np.int64)
    for turn, start in _answers(path):
        if turn.number in own:
            answer = slice(start, start + len(turn.token_ids))
            logprobs[answer] = turn.logprobs
            turn_T[answer] = turn.number
            for span in turn.versions:
                version_T[start + span.start : start + span.stop] = span.version
    return Row(
        token_ids=token_ids,
        is_trained=turn_T >= 0,
        logprobs=logprobs,
        turn_T=turn_T,
        versions=tuple(span for span in spans_of(version_T.tolist()) if span.version >= 0),
        routed_experts=_join_reports(path, "routed_experts"),
        indexer_topk=_join_reports(path, "indexer_topk"),
        images=images_of(path),
    )


def images_of(path: Sequence[Turn]) -> tuple[PromptImage, ...]:
    """Return the images of the turns of a row, in order."""
    return tuple(chain.from_iterable(turn.images for turn in path))


def _answers(path: Sequence[Turn]) -> Iterator[tuple[Turn, int]]:
    """Yield each turn and the position of its answer's first token."""
    end = 0
    for turn in path:
        start = end + len(turn.context_ids)
        end = start + len(turn.token_ids)
        yield turn, start


def _join_reports(path: Sequence[Turn], name: str) -> Tensor | None:
    """Return the experts or chosen keys of all tokens but the last, each as it was first run.

    The last token of an answer is run by the next turn.
    """
    parts = []
    start = 0
    for turn, answer_start in _answers(path):
        reported = getattr(turn, name)
        if reported is None:
            return None
        stop = answer_start + len(turn.token_ids) - 1
        own = reported[start - turn.experts_start :]
        assert turn.experts_start <= start and len(own) == stop - start, (
            f"turn {turn.number} has {name} of {len(own)} tokens from {turn.experts_start} on,"
            f" needed are {start} to {stop}"
        )
        parts.append(own)
        start = stop
    return torch.cat(parts)


def _record(turn: Turn) -> TurnRecord:
    return TurnRecord(
        number=turn.number,
        parent=turn.parent,
        fork=str(turn.fork),
        messages=turn.messages,
        answer=turn.answer.message,
        num_tokens=len(turn.token_ids),
        finish_reason=turn.finish_reason,
        reward=turn.reward,
        calls=tuple(f"{attempt.name}: {attempt.status}" for attempt in turn.answer.attempts),
        adapter=turn.adapter,
        versions=tuple(span.version for span in turn.versions),
    )

"""Records one episode: answers requests of messages with sampled tokens, and keeps these exactly.

request: messages --find the turn that they continue--> context ids --engine--> ids --> answer
                      |                                                          |
                      +------------------ turn tree <----------------------------+
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mcore_rl.agents.chat.template import Format
from mcore_rl.agents.images import list_image_parts
from mcore_rl.agents.messages import (
    Answer,
    ChatRequest,
    Completion,
    ConversationError,
    EndReason,
    EpisodeEndedError,
    Message,
    Tool,
    add_message,
    make_fingerprints,
)
from mcore_rl.agents.turn_tree import Fork, Turn, TurnTree, at_leaves, rows_of
from mcore_rl.types import EpisodeRecord, PromptImage, Sample


class Parser(Protocol):
    """See chat.AnswerParser."""

    async def parse(
        self,
        token_ids: Sequence[int],
        tools: Sequence[Tool],
        finish_reason: str,
        taken: Sequence[str] = (),
        stop: Sequence[str] = (),
    ) -> Answer: ...


@dataclass(frozen=True)
class TurnRequest:
    """Asks an engine for an answer.

    turn            number of the request in its episode, failed ones included, so that seeds differ
    experts_start   the first token whose experts are not known yet
    images          those that context_ids shows, in order
    adapter         what answers in the place of the policy, by the engines' name; empty: the policy
    """

    turn: int
    context_ids: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...]
    experts_start: int
    images: tuple[PromptImage, ...] = ()
    adapter: str = ""


SampleTurn = Callable[[TurnRequest], Awaitable[Sample]]
"""Returns a sample whose prompt is the context; its experts begin at experts_start."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Bounds of an episode.

    max_turns        answers of the policy, those under way included; failed requests are none
    max_turn_len     tokens of one answer
    max_tokens       tokens of a row, context and answers together
    """

    max_turns: int
    max_turn_len: int
    max_tokens: int


@dataclass(frozen=True)
class RowPlace:
    """Where a request continues an episode.

    hashes    of the request's messages, see normal.fingerprints
    history   messages up to the parent's answer
    """

    hashes: list[bytes]
    parent: int | None
    fork: Fork
    history: tuple[Message, ...]
    new: tuple[Message, ...]


@dataclass
class EpisodeRecorder:
    """The policy in one episode. Requests may overlap; all calls come on one event loop.

    images        every image that messages name, by digest
    image_marks   tokens by which engines find images in ids; none if the model sees text alone
    num_requests  what engines were asked for, whether or not they answered
    """

    format: Format
    parser: Parser
    sample: SampleTurn
    limits: EpisodeLimits
    images: Mapping[str, PromptImage] = field(default_factory=dict)
    image_marks: frozenset[int] = frozenset()
    tree: TurnTree = field(default_factory=TurnTree)
    num_requests: int = 0
    reward: float = 0.0
    end: EndReason | None = None

    def __post_init__(self) -> None:
        self._ends: dict[bytes, int] = {}
        """The last turn that ended with this conversation, by fingerprint."""
        self._asked: set[bytes] = set()
        """Conversations that were answered, by fingerprint."""
        self._begun: set[bytes] = set()
        """First messages of conversations, by fingerprint."""
        self._continued: set[int] = set()
        self._call_ids: list[str] = []
        self._num_in_flight = 0

    async def complete(self, request: ChatRequest) -> Completion:
        """Sample the next answer. Raises EpisodeEndedError if the episode is over or has no room.

        ConversationError: no message asks for an answer, or the template refuses them.
        """
        if not request.messages or request.messages[-1].get("role") == "assistant":
            raise ConversationError(
                "the last message must not be the assistant's: nothing asks for more"
            )
        if self.end is not None:
            raise EpisodeEndedError(self.end)
        num_answers = len(self.tree.turns) + self._num_in_flight
        if num_answers >= self.limits.max_turns:
            raise EpisodeEndedError(EndReason.MAX_TURNS, f"{num_answers} answers")
        self._refuse_sampled_marks()
        place = self._find(request)
        place, prefix_ids, context_ids = self._context(place, request)
        images = tuple(self.images[part["image"]] for part in list_image_parts(place.new))
        room = self.limits.max_tokens - len(prefix_ids) - len(context_ids)
        if room < 1:
            used = len(prefix_ids) + len(context_ids)
            raise EpisodeEndedError(
                EndReason.MAX_TOKENS, f"{used} of {self.limits.max_tokens} tokens"
            )
        longest = min(room, self.limits.max_turn_len, request.max_tokens or room)
        experts_start = max(len(prefix_ids) - 1, 0)
        before = () if place.parent is None else self.tree.path_images(place.parent)
        ids = prefix_ids + context_ids
        number = self.num_requests
        self.num_requests += 1
        asked = (number, ids, longest, request.stop, experts_start, before + images)
        sample, answer = await self._ask(TurnRequest(*asked, request.adapter), request.tools)
        if self.end is not None:
            raise EpisodeEndedError(self.end, "it ended while the answer was sampled")
        turn = self._add(request, place, context_ids, images, experts_start, sample, answer)
        return Completion(
            turn=turn.number,
            answer=answer,
            prompt_ids=ids,
            token_ids=turn.token_ids,
            logprobs=turn.logprobs,
            finish_reason=_finish_reason(sample, answer),
        )

    async def _ask(self, asked: TurnRequest, tools: Sequence[Tool]) -> tuple[Sample, Answer]:
        """Return a sample and the message that it is; a failure leaves room for another answer."""
        self._num_in_flight += 1
        try:
            sample = await self.sample(asked)
            answer = await self.parser.parse(
                sample.response_ids, tools, sample.finish_reason, self._call_ids, asked.stop
            )
        finally:
            self._num_in_flight -= 1
        return sample, answer

    def add_reward(self, reward: float, turn: int | None = None) -> None:
        """Add to the reward of a turn, or of the episode.

        Raises ValueError for a turn that is not there.
        """
        if self.end is not None:
            raise EpisodeEndedError(self.end, "it takes no more rewards")
        if turn is None:
            self.reward += reward
        elif not 0 <= turn < len(self.tree.turns):
            raise ValueError(f"turn {turn}: the episode has {len(self.tree.turns)} turns")
        else:
            self.tree.add_reward(turn, reward)

    def finish(self, end: EndReason, detail: str = "") -> EpisodeRecord:
        """End the episode, once; what is still being sampled is not part of it."""
        assert self.end is None, f"the episode ended with {self.end}, now with {end}"
        self.end = end
        return EpisodeRecord(
            rows=rows_of(self.tree, at_leaves),
            turns=self.tree.records(),
            end=str(end),
            reward=self.reward + sum(turn.reward for turn in self.tree.turns),
            detail=detail,
            engines=tuple(engine for turn in self.tree.turns for engine in turn.engines),
        )

    def _refuse_sampled_marks(self) -> None:
        """Raise EpisodeEndedError if the policy has said a token that marks images.

        In the ids of a later request it would be a piece or the beginning of an image.
        """
        if self.image_marks and any(
            not self.image_marks.isdisjoint(turn.token_ids) for turn in self.tree.turns
        ):
            raise EpisodeEndedError(
                EndReason.PARSE_ERROR, "the policy said a token that marks images"
            )

    def _find(self, request: ChatRequest) -> RowPlace:
        """Return the turn whose conversation is the longest beginning of the request's."""
        messages = request.messages
        hashes = make_fingerprints(messages, request.tools, request.adapter)
        is_retry = hashes[-1] in self._asked
        for k in range(len(messages), 0, -1):
            parent = self._ends.get(hashes[k])
            if parent is not None:
                fork = Fork.BRANCH if parent in self._continued else Fork.NONE
                history = tuple(self.tree.conversation(parent))
                fork = Fork.RETRY if is_retry else fork
                return RowPlace(hashes, parent, fork, history, messages[k:])
        if is_retry:
            fork = Fork.RETRY
        elif not self.tree.turns:
            fork = Fork.NONE
        else:
            fork = Fork.HISTORY if hashes[1] in self._begun else Fork.SUB_AGENT
        return RowPlace(hashes, None, fork, (), messages)

    def _context(
        self, place: RowPlace, request: ChatRequest
    ) -> tuple[RowPlace, tuple[int, ...], tuple[int, ...]]:
        """Return the place, the ids of its row so far, and those that come before the answer."""
        if place.parent is not None:
            parent = self.tree.turns[place.parent]
            appended = self.format.render_appended(
                place.history, parent.token_ids, place.new, request.tools
            )
            if appended is not None:
                return place, self.tree.path_ids(place.parent), appended
            messages = (*place.history, *place.new)
            place = RowPlace(place.hashes, None, place.fork or Fork.TEMPLATE, (), messages)
        return place, (), self.format.render_whole(place.new, request.tools)

    def _add(
        self,
        request: ChatRequest,
        place: RowPlace,
        context_ids: tuple[int, ...],
        images: tuple[PromptImage, ...],
        experts_start: int,
        sample: Sample,
        answer: Answer,
    ) -> Turn:
        turn = Turn(
            number=len(self.tree.turns),
            parent=place.parent,
            fork=place.fork,
            messages=place.new,
            tools=request.tools,
            context_ids=context_ids,
            token_ids=sample.response_ids,
            logprobs=sample.logprobs,
            versions=sample.versions,
            engines=sample.engines,
            finish_reason=sample.finish_reason,
            answer=answer,
            routed_experts=sample.routed_experts,
            indexer_topk=sample.indexer_topk,
            experts_start=experts_start,
            images=images,
            adapter=request.adapter,
        )
        self.tree.add(turn)
        self._ends[add_message(place.hashes[-1], answer.message)] = turn.number
        self._asked.add(place.hashes[-1])
        self._begun.add(place.hashes[1])
        if turn.parent is not None:
            self._continued.add(turn.parent)
        self._call_ids += [attempt.call_id for attempt in answer.attempts if attempt.call_id]
        return turn


def _finish_reason(sample: Sample, answer: Answer) -> str:
    if sample.finish_reason == "stop" and answer.message.get("tool_calls"):
        return "tool_calls"
    return sample.finish_reason

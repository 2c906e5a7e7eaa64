"""Runs episodes: the policy talks with an environment, or a program talks with the policy.

environment kind            how an episode goes
reset and step              start -> answer -> step -> answer -> ... -> done
a program                   it is started with a base URL and a key, and asks on its own
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mcore_rl.agents.environments.adapters import is_program
from mcore_rl.agents.environments.environment import EnvironmentLostError, EpisodeError, Step
from mcore_rl.agents.environments.pool import EnvironmentPool, OpenEpisode, make_task_fields
from mcore_rl.agents.gateway.gateway import Gateway
from mcore_rl.agents.images import MessageImages, SeeingFormat, Sight, make_prompt_messages
from mcore_rl.agents.messages import (
    Answer,
    CallStatus,
    ChatRequest,
    Completion,
    EndReason,
    EpisodeEndedError,
    EpisodeTask,
    Message,
)
from mcore_rl.agents.recorder import (
    EpisodeLimits,
    EpisodeRecorder,
    Format,
    Parser,
    SampleTurn,
    TurnRequest,
)
from mcore_rl.batches.episodes import sample_of_episode
from mcore_rl.types import Prompt, PromptImage, Sample

_log = logging.getLogger(__name__)
BY_THE_RUN = (EndReason.DROPPED_STALE, EndReason.ABORTED)
TOLD_BY_ENVIRONMENTS = tuple(str(reason) for reason in EndReason if reason not in BY_THE_RUN)


@dataclass(frozen=True)
class RunnerOptions:
    """How episodes are run.

    deadline_s      for a whole episode, from its reset on: waiting for a place does not count
    max_bad_calls   answers in a row whose tool calls cannot be executed, before the episode ends
    compaction      shortens the conversation before each answer; None: it stays whole
    """

    limits: EpisodeLimits
    deadline_s: float
    max_bad_calls: int
    compaction: Callable[[Sequence[Message]], Sequence[Message]] | None = None


@dataclass
class Ending:
    """Why an episode is over, and what its environment told."""

    end: EndReason
    detail: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


class WatchedEngines:
    """Samples turns, and keeps the error of the last one if the engines failed it."""

    def __init__(self, sample_turn: SampleTurn) -> None:
        self._sample_turn = sample_turn
        self.failure: Exception | None = None

    async def __call__(self, turn: TurnRequest) -> Sample:
        self.failure = None
        try:
            return await self._sample_turn(turn)
        except Exception as failure:  # handed on, now and when the episode has ended
            self.failure = failure
            raise


class EpisodeRunner:
    """Runs episodes of one environment; many at once, on one event loop."""

    def __init__(
        self,
        kind: str,
        pool: EnvironmentPool,
        chat_format: Format,
        parser: Parser,
        decode: Callable[[Sequence[int]], str],
        options: RunnerOptions,
        gateway: Gateway | None = None,
        sight: Sight | None = None,
    ) -> None:
        """`gateway`: where programs reach the policy; only needed if programs run episodes.

        `sight`: None for a model that sees text alone.
        """
        self._pool = pool
        self._sight = sight
        self._format = SeeingFormat(chat_format, sight.placeholder_id) if sight else chat_format
        self._parser = parser
        self._decode = decode
        self._options = options
        self._gateway = gateway
        self._is_program = is_program(kind)

    async def run(self, prompt: Prompt, index: int, seed: int, sample_turn: SampleTurn) -> Sample:
        """Run one episode of a prompt and return it as sample number `index`.

        An environment that is lost is tried once more, from the beginning. Whatever goes wrong in
        it ends the episode with a reason; errors of the engines are raised.
        """
        task = EpisodeTask(
            messages=make_prompt_messages(prompt),
            data_source=prompt.data_source,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
            index=prompt.index,
            sample_index=index,
            seed=seed,
        )
        try:
            recorder, outcome = await self._try(task, prompt, sample_turn)
        except EnvironmentLostError as lost:
            _log.warning("%s; the episode begins again", lost)
            try:
                recorder, outcome = await self._try(task, prompt, sample_turn)
            except EnvironmentLostError as again:
                recorder = self._recorder(sample_turn, {})
                outcome = Ending(EndReason.ENV_ERROR, str(again))
        episode = recorder.finish(outcome.end, outcome.detail)
        episode = replace(episode, metrics=outcome.metrics)
        return sample_of_episode(prompt, index, episode, self._text(recorder))

    async def _try(
        self, task: EpisodeTask, prompt: Prompt, sample_turn: SampleTurn
    ) -> tuple[EpisodeRecorder, Ending]:
        engines = WatchedEngines(sample_turn)
        images = MessageImages(self._sight, prompt.images)
        recorder = self._recorder(engines, images.by_digest)
        try:
            if self._is_program:
                outcome = await self._run_program(task, recorder)
            else:
                outcome = await self._talk(task, recorder, images)
        except EnvironmentLostError:
            raise
        except EpisodeError as error:
            outcome = Ending(EndReason.ENV_ERROR, str(error))
            _log.warning("%s", error)
        if engines.failure is not None:
            # A program was told of it as of a server that fails, and may have given up.
            raise engines.failure
        return recorder, outcome

    def _recorder(
        self, sample_turn: SampleTurn, images: Mapping[str, PromptImage]
    ) -> EpisodeRecorder:
        return EpisodeRecorder(
            self._format,
            self._parser,
            sample_turn,
            self._options.limits,
            images,
            self._sight.marks if self._sight else frozenset(),
        )

    async def _talk(
        self, task: EpisodeTask, recorder: EpisodeRecorder, images: MessageImages
    ) -> Ending:
        episode = await self._pool.open(task)
        talk = Talk(episode, recorder, self._options, images)
        deadline_s = self._options.deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                return await talk.go_on()
        except TimeoutError:
            return Ending(EndReason.DEADLINE, f"after {deadline_s:g} s", talk.metrics)
        finally:
            await episode.close()

    async def _run_program(self, task: EpisodeTask, recorder: EpisodeRecorder) -> Ending:
        assert self._gateway is not None, "programs need a gateway"
        session = self._gateway.open_session(recorder)
        fields = make_task_fields(task)
        fields |= {"gateway_url": session.openai_url, "gateway_key": session.key}
        try:
            result = await self._pool.run(fields)
        finally:
            told = await self._gateway.close_session(session.key)
        if result.reward is not None:
            recorder.add_reward(result.reward)
        ending, detail = _tell_results(result.end_reason), result.detail
        if ending == EndReason.TOOL_ERROR and told["refused"]:
            ending = EndReason.ENV_ERROR  # it may have given up because of that
            detail = f"the gateway refused {told['refused']:g} of its requests (429); {detail}"
        return Ending(ending, detail, told | dict(result.metrics))

    def _text(self, recorder: EpisodeRecorder) -> str:
        """Return the conversation after the first context, as the last row shows it."""
        tree = recorder.tree
        if not tree.turns:
            return ""
        path = tree.path(len(tree.turns) - 1)
        ids = tree.path_ids(len(tree.turns) - 1)
        return self._decode(ids[len(path[0].context_ids) :])


class Talk:
    """One episode of an environment with reset and step."""

    def __init__(
        self,
        episode: OpenEpisode,
        recorder: EpisodeRecorder,
        options: RunnerOptions,
        images: MessageImages,
    ) -> None:
        self._images = images
        self._episode = episode
        self._recorder = recorder
        self._options = options
        self._tools = tuple(episode.start.tools)
        self.metrics: dict[str, float] = dict(episode.start.metrics)
        self._num_bad = 0

    async def go_on(self) -> Ending:
        """Let policy and environment talk until the episode is over."""
        messages = await self._images.read(self._episode.start.messages)
        while True:
            if self._options.compaction is not None:
                messages = list(self._options.compaction(messages))
            try:
                completion = await self._recorder.complete(
                    ChatRequest(tuple(messages), self._tools)
                )
            except EpisodeEndedError as ended:
                return Ending(ended.reason, str(ended), self.metrics)
            answer = completion.answer
            messages.append(answer.message)
            self._count_calls(answer)
            if completion.finish_reason == "length" and self._is_full(completion):
                return Ending(EndReason.MAX_TOKENS, "", self.metrics)
            told = list_complaints(answer)
            if told and not answer.message.get("tool_calls"):
                self._num_bad += 1
                if self._num_bad > self._options.max_bad_calls:
                    return Ending(EndReason.PARSE_ERROR, told[0]["content"], self.metrics)
                messages += told
                continue
            self._num_bad = 0
            step = await self._step(answer.message, completion.turn)
            if step.done:
                end = _tell_results(step.end_reason) if step.end_reason else EndReason.DONE
                return Ending(end, "", self.metrics)
            messages += [*await self._images.read(step.messages), *told]

    async def _step(self, answer: Message, turn: int) -> Step:
        began_s = time.monotonic()
        step = await self._episode.step(answer)
        self._add("environment_s", time.monotonic() - began_s)
        self.metrics |= step.metrics
        if step.reward:
            self._recorder.add_reward(step.reward, turn)
        return step

    def _is_full(self, completion: Completion) -> bool:
        num_tokens = len(completion.prompt_ids) + len(completion.token_ids)
        return num_tokens >= self._options.limits.max_tokens

    def _count_calls(self, answer: Answer) -> None:
        for attempt in answer.attempts:
            self._add(f"calls/{attempt.status}", 1.0)

    def _add(self, name: str, value: float) -> None:
        self.metrics[name] = self.metrics.get(name, 0.0) + value


def _tell_results(reason: str) -> EndReason:
    """Return the reason that an environment gives; EpisodeError if it is none of theirs."""
    if reason not in TOLD_BY_ENVIRONMENTS:
        raise EpisodeError(
            f"the environment ends an episode with end_reason={reason!r}: give one of"
            f" {', '.join(TOLD_BY_ENVIRONMENTS)}"
        )
    return EndReason(reason)


def list_complaints(answer: Answer) -> list[Message]:
    """Return what the policy is told of the calls that it wrote and that were not executed."""
    errors = [a.error or a.status for a in answer.attempts if a.status is not CallStatus.OK]
    if not errors:
        return []
    return [{"role": "user", "content": "Not executed: " + "; ".join(errors)}]

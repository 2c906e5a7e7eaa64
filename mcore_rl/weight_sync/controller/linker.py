"""Links one engine to the trainer ranks; each engine succeeds or fails by itself.

 controller                         engine's ranks              trainer ranks
 connect ------- HTTP ------------> facts
 all facts: the roster <----------- to the store                facts, once a run
 the roster ----------------------> trace, plan                 plan
 answers compared <---------------- to the store                answers, by call
 agreed --------------------------> connect <-----------------> connect
 reports <------------------------- to the store                reports, by call

A call goes to all trainer ranks and covers all engines that wait for it. So the number of calls
does not grow with the engines, and no trainer rank waits for a late engine.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, TypeVar

from mcore_rl.process.errors import describe_error
from mcore_rl.weight_sync.controller.engine_control import EngineCallError, EngineControl
from mcore_rl.weight_sync.controller.linked_engine import LinkedEngine
from mcore_rl.weight_sync.controller.strategy import TrainerRanks
from mcore_rl.weight_sync.controller.sync_report import find_root_error
from mcore_rl.weight_sync.link_store import DATA, FACTS, RECORDED_PLAN
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weight_sync.wire import Report
from mcore_rl.weights.lora.places import Content

Item = TypeVar("Item")
Answer = TypeVar("Answer")
T = TypeVar("T")
Opened = str | Report
"""As WeightSender.open_links returns it."""


class LinkError(RuntimeError):
    """An engine could not be linked; the message names the rank and the cause."""


class EngineLinker:
    """Links engines to the trainer ranks, which published `facts` for links of each content."""

    def __init__(self, trainers: TrainerRanks, facts: Mapping[Content, Sequence[bytes]]) -> None:
        self._facts = {kind: [DATA + each for each in of_kind] for kind, of_kind in facts.items()}
        turn = asyncio.Lock()
        self._plan = JoinedCalls(trainers.plan_links, turn)
        self._open = JoinedCalls(trainers.open_links, turn)

    async def link(self, control: EngineControl, engine: LinkedEngine, deadline_s: float) -> str:
        """Have all ranks join the engine's link; return the digest of the agreed plan.

        Raises LinkError once a rank has failed, or some seconds after time.monotonic() passes
        `deadline_s`.
        """
        engine.store.keep(engine.link)
        sent, answer = await asyncio.gather(
            _tell_failure(engine, self.join(engine, deadline_s)),
            _tell_failure(engine, engine.command(control, "connect")),
            return_exceptions=True,
        )
        if answer is None:
            received = await engine.wait_reports("connect", deadline_s)
        else:
            received = engine.take_reports("connect")
        return _judge(sent, received, answer)

    async def join(self, engine: LinkedEngine, deadline_s: float) -> Sequence[Opened]:
        """Act for the trainer ranks at the store; return each rank's digest, or its error."""
        link = engine.link
        store = engine.store
        store.publish_tagged(FACTS, self._facts[link.content])
        roster = await store.wait_joined_async(FACTS, link.names, "the controller", deadline_s)
        answers = await _await_trainers(self._plan.ask((link, roster)))
        store.publish_tagged(RECORDED_PLAN, answers)
        problems = await store.wait_joined_async(
            RECORDED_PLAN, link.names, "the controller", deadline_s
        )
        return await _await_trainers(self._open.ask((link.engine, problems.decode())))


class JoinedCalls(Generic[Item, Answer]):
    """Joins calls for single engines into calls of all trainer ranks for several engines.

    While a call is in flight, further calls wait and are joined into the next one.
    """

    def __init__(
        self,
        call: Callable[[Sequence[Item]], Awaitable[Sequence[Sequence[Answer]]]],
        turn: asyncio.Lock,
    ) -> None:
        """`call` takes items, and returns for each rank an answer per item; `turn` orders calls."""
        self._call = call
        self._turn = turn
        self._waiting: list[tuple[Item, asyncio.Future[list[Answer]]]] = []

    async def ask(self, item: Item) -> list[Answer]:
        """Return each rank's answer to `item`.

        An error of the joined call is raised for all its items. If the task that makes the joined
        call is canceled, all other tasks get a RuntimeError.
        """
        answer: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, answer))
        async with self._turn:
            if not answer.done():
                await self._call_all()
        return await answer

    async def _call_all(self) -> None:
        batch, self._waiting = self._waiting, []
        try:
            by_rank = await self._call([item for item, _ in batch])
            answers = [[of_rank[i] for of_rank in by_rank] for i in range(len(batch))]
        except BaseException as error:
            told = error
            if not isinstance(error, Exception):  # A cancellation concerns only this task.
                told = RuntimeError(f"the joined call was cut off: {type(error).__name__}")
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(told)
                    answer.exception()  # Otherwise the log shows it if nobody awaits it any more.
            raise
        for (_, answer), of_item in zip(batch, answers, strict=True):
            if not answer.done():  # The waiting task may be canceled.
                answer.set_result(of_item)


async def _await_trainers(call: Awaitable[T]) -> T:
    """Return the trainer ranks' answers; raise LinkError if the call failed."""
    try:
        return await call
    except (RuntimeError, OSError) as error:
        raise LinkError(f"the trainer ranks failed: {error}") from error


async def _tell_failure(engine: LinkedEngine, work: Awaitable[T]) -> T:
    """Return the result of `work`; if `work` fails, mark the link as failed for all its ranks."""
    try:
        return await work
    except Exception as error:
        named = isinstance(error, TransferError | LinkError | EngineCallError)
        engine.store.fail(str(error) if named else describe_error(error))
        raise


def _judge(
    sent: Sequence[Opened] | BaseException,
    received: Sequence[Report],
    answer: BaseException | None,
) -> str:
    """Return the digest that all ranks reported, or raise LinkError with the first cause."""
    if isinstance(sent, LinkError):
        raise sent
    for error in (sent, answer):
        if isinstance(error, BaseException) and not isinstance(
            error, (TransferError, EngineCallError)
        ):
            raise error
    if isinstance(sent, BaseException):
        failed = [report for report in received if report.error and not report.missing]
        message = find_root_error(failed, answer) if failed or answer else str(sent)
        raise LinkError(message) from sent
    failed = [each for each in sent if isinstance(each, Report)]
    opened = {each for each in sent if isinstance(each, str)}
    message = find_root_error([*failed, *received], answer, opened)
    if message is not None:
        raise LinkError(message)
    return received[0].digest

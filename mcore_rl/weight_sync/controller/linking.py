"""Links engines to the trainer ranks, all at once; each succeeds or fails by itself.

 controller                         engine's ranks              trainer ranks
 connect ------- HTTP ------------> facts
 all facts: the roster <----------- to the store                facts, once a run
 the roster ----------------------> trace, plan                 plan
 answers compared <---------------- to the store                answers, by call
 agreed --------------------------> connect <-----------------> connect
 reports <------------------------- to the store                reports, by call

A call goes to all trainer ranks, and carries every engine that is as far: so their number of calls
does not grow with the engines, and no trainer rank ever waits for an engine that is late.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from mcore_rl.process.errors import describe_error
from mcore_rl.weight_sync.controller.engine_control import EngineCallError, EngineControl
from mcore_rl.weight_sync.controller.linked_engine import LinkedEngine
from mcore_rl.weight_sync.controller.strategy import TrainerRanks
from mcore_rl.weight_sync.controller.sync_report import root_error
from mcore_rl.weight_sync.link_keeper import DATA, FACTS, RECORDED_PLAN
from mcore_rl.weight_sync.transports.transport import TransferError
from mcore_rl.weight_sync.wire import Report

Item = TypeVar("Item")
Answer = TypeVar("Answer")
T = TypeVar("T")
Opened = str | Report
"""As WeightSender.open_links returns it."""


class LinkError(RuntimeError):
    """An engine could not be linked; the message names the rank and why."""


class EngineLinker:
    """Has the ranks of engines meet the trainer ranks, whose published facts are `facts`."""

    def __init__(self, trainers: TrainerRanks, facts: Sequence[bytes]) -> None:
        self._facts = [DATA + each for each in facts]
        turn = asyncio.Lock()
        self._plan = JoinedCalls(trainers.plan_links, turn)
        self._open = JoinedCalls(trainers.open_links, turn)

    async def link(self, control: EngineControl, engine: LinkedEngine, deadline_s: float) -> str:
        """Have all ranks join the engine's link; return the digest of the plan they agreed on.

        Raises LinkError once a rank failed, or some seconds after time.monotonic() passes
        `deadline_s`.
        """
        engine.store.keep(engine.link)
        sent, answer = await asyncio.gather(
            _tell_failure(engine, self._join_trainers(engine, deadline_s)),
            _tell_failure(engine, engine.command(control, "connect")),
            return_exceptions=True,
        )
        if answer is None:
            received = await engine.wait_reports("connect", deadline_s)
        else:
            received = engine.take_reports("connect")
        return _judge(sent, received, answer)

    async def _join_trainers(self, engine: LinkedEngine, deadline_s: float) -> Sequence[Opened]:
        """Play the trainer ranks' part at the store; return what became of the link at each."""
        link = engine.link
        store = engine.store
        store.publish_tagged(FACTS, self._facts)
        roster = await store.wait_joined_async(FACTS, link.names, "the controller", deadline_s)
        answers = await _of_trainers(self._plan.ask((link, roster)))
        store.publish_tagged(RECORDED_PLAN, answers)
        problems = await store.wait_joined_async(
            RECORDED_PLAN, link.names, "the controller", deadline_s
        )
        return await _of_trainers(self._open.ask((link.engine, problems.decode())))


class JoinedCalls(Generic[Item, Answer]):
    """Joins calls for one engine each into calls of all trainer ranks for several engines.

    A call that comes while another is under way waits for its turn, with all that came meanwhile.
    """

    def __init__(
        self,
        call: Callable[[Sequence[Item]], Awaitable[Sequence[Sequence[Answer]]]],
        turn: asyncio.Lock,
    ) -> None:
        """`call` takes items and returns for each rank one answer per item; calls take `turn`s."""
        self._call = call
        self._turn = turn
        self._waiting: list[tuple[Item, asyncio.Future[list[Answer]]]] = []

    async def ask(self, item: Item) -> list[Answer]:
        """Return each rank's answer to `item`; an error of the call is raised for all its items.

        If the asker that makes the call is canceled, the others get a RuntimeError.
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
            if not isinstance(error, Exception):  # a cancellation is that of its asker alone
                told = RuntimeError(f"the joined call was cut off: {type(error).__name__}")
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(told)
                    answer.exception()  # else the log would show it if its asker is gone
            raise
        for (_, answer), of_item in zip(batch, answers, strict=True):
            if not answer.done():  # its asker may be gone
                answer.set_result(of_item)


async def _of_trainers(call: Awaitable[T]) -> T:
    """Return the trainer ranks' answers; LinkError if the call failed."""
    try:
        return await call
    except (RuntimeError, OSError) as error:
        raise LinkError(f"the trainer ranks failed: {error}") from error


async def _tell_failure(engine: LinkedEngine, work: Awaitable[T]) -> T:
    """Return the result of `work`; mark the link as failed for all its ranks if it fails."""
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
        message = root_error(failed, answer) if failed or answer else str(sent)
        raise LinkError(message) from sent
    failed = [each for each in sent if isinstance(each, Report)]
    opened = {each for each in sent if isinstance(each, str)}
    message = root_error([*failed, *received], answer, opened)
    if message is not None:
        raise LinkError(message)
    return received[0].digest

"""Lists, adds and takes out engines while a run goes on, as `mcore-rl engines` asks it to.

mcore-rl engines --files in <run.dir>/requests--> EngineRequests --> EngineGroup
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from mcore_rl.cluster.answers import RankError
from mcore_rl.cluster.engines import EngineGroup
from mcore_rl.cluster.run import RunProcesses
from mcore_rl.process.errors import describe_error
from mcore_rl.process.http import open_session
from mcore_rl.process.run_requests import RequestInbox, RunRequest
from mcore_rl.rollout.kv_admission import count_requests
from mcore_rl.run.parts import StartedRun

POLL_S = 1.0
_log = logging.getLogger(__name__)


class EngineRequests:
    """Carries out requests about the engines of a run, on its event loop."""

    def __init__(
        self,
        inbox: RequestInbox,
        engines: EngineGroup,
        processes: RunProcesses,
        request_timeout_s: float,
    ) -> None:
        """`request_timeout_s`: how long the requests of an engine that is drained may take."""
        self._inbox = inbox
        self._engines = engines
        self._processes = processes
        self._request_timeout_s = request_timeout_s
        self._adding = asyncio.Lock()

    async def serve(self) -> None:
        """Take requests, several at a time; return only if their folder cannot be read."""
        async with asyncio.TaskGroup() as carrying_out:
            while True:
                try:
                    requests = await asyncio.to_thread(self._inbox.take)
                except OSError as error:
                    _log.warning("no further requests about engines are taken: %s", error)
                    return
                for request in requests:
                    carrying_out.create_task(self._carry_out(request))
                await asyncio.sleep(POLL_S)

    async def _carry_out(self, request: RunRequest) -> None:
        _log.info("request: %s", request.words)
        try:
            text = await self._execute(request.words)
        except (ValueError, RankError) as error:
            _log.warning("request %s: %s", request.words, error)
            self._inbox.answer(request, str(error), is_done=False)
        except Exception as error:  # handed on: whoever gave the request is told
            _log.exception("request %s", request.words)
            self._inbox.answer(request, describe_error(error), is_done=False)
        else:
            self._inbox.answer(request, text, is_done=True)

    async def _execute(self, words: Mapping[str, Any]) -> str:
        """Carry out a request; return what to say. Raises ValueError if it cannot be."""
        match words:
            case {"do": "list"}:
                return format_engines(self._engines.describe(), self._engines.health.version)
            case {"do": "add"}:
                async with self._adding:
                    address = await self._engines.add(self._processes.reserve_engine)
                return f"engine {address.number} is up at {address.url}, and serves after a sync"
            case {"do": "drain", "engine": int(engine)}:
                if self._processes.are_engines_colocated:
                    raise ValueError(
                        "cluster.colocated=true: engines share the GPUs of the trainer's ranks;"
                        " none can be taken out"
                    )
                async with open_session(self._request_timeout_s) as http:
                    count = partial(count_requests, http)
                    await self._engines.drain(engine, count, self._request_timeout_s)
                return f"engine {engine} has ended; `mcore-rl engines add` uses its place"
        raise ValueError(f"the run knows no request {dict(words)}")


@contextmanager
def serve_engine_requests(run: StartedRun, request_timeout_s: float) -> Iterator[None]:
    """Carry out requests for the block."""
    inbox = RequestInbox(run.folder.path)
    requests = EngineRequests(inbox, run.started.engines, run.processes, request_timeout_s)
    with inbox.open():
        serving = run.processes.event_loop.start(requests.serve())
        try:
            yield
        finally:
            serving.cancel()


def format_engines(engines: Sequence[tuple[int, str, str, str]], version: int) -> str:
    """Return a table of engines: number, address, node and state of each."""
    rows = [("engine", "address", "node", "state")]
    for number, url, node, state in engines:
        with_version = f"serves version {version}" if state == "serves" else state
        rows.append((str(number), url, node, with_version))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]])
        for row in rows
    )

"""Engines, trainer and weight links without a model: the log-prob of token t is -t * weight.

`ScoringEngine` answers SGLang's scoring requests over HTTP; the others play the trainer ranks and
the links from them to the engines.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from mcore_rl.process.event_loop import EventLoop
from mcore_rl.types import LogprobOptions, StepStats, TokenScores, TrainBatch
from mcore_rl.weight_sync.controller.sync import SyncError
from mcore_rl.weight_sync.controller.sync_report import EngineSyncResult, SyncReport


class ScoringEngine:
    """An HTTP server with one weight; an engine of another weight gives other log-probs."""

    def __init__(self, loop: EventLoop, weight: float = 0.0) -> None:
        self.weight = weight
        self.num_requests = 0
        self.url = loop.run(self._start())

    async def _start(self) -> str:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}
        self.num_requests += 1
        tokens = body["input_ids"][body["logprob_start_len"] :]
        entries = [[-token * self.weight, token, None] for token in tokens]
        entries[0][0] = None  # the first token has no log-prob
        return web.json_response({"meta_info": {"input_token_logprobs": entries}})


class OneWeightTrainer:
    """A trainer of one weight."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.num_passes = 0

    def compute_logprobs(
        self, batch: TrainBatch, options: LogprobOptions = LogprobOptions()
    ) -> TokenScores:
        assert options.temperature == 1.0 and batch.routed_experts_TLK is None
        self.num_passes += 1
        return TokenScores(-batch.token_ids_T.float() * self.weight)

    def train_step(self, batch: TrainBatch) -> StepStats:
        raise NotImplementedError

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        raise NotImplementedError


class OneWeightLinks:
    """Links that copy the trainer's weight into engines; `corrupt` engines get it wrong, but say
    nothing.
    """

    def __init__(self, trainer: OneWeightTrainer, engines: Sequence[ScoringEngine]) -> None:
        self._trainer = trainer
        self._engines = {engine.url: engine for engine in engines}
        self._versions: dict[str, int | None] = {}
        self._sent: dict[str, float] = {}
        self.verifies = True
        self.corrupt: set[str] = set()
        self.unreachable: set[str] = set()

    @property
    def linked(self) -> tuple[str, ...]:
        return tuple(self._versions)

    @property
    def in_rotation(self) -> tuple[str, ...]:
        newest = max(v for v in self._versions.values() if v is not None)
        return tuple(url for url, version in self._versions.items() if version == newest)

    def forget_links(self) -> None:
        self._versions.clear()

    def unlink(self, url: str) -> None:
        self._versions.pop(url, None)

    async def connect(self, urls: Sequence[str]) -> None:
        failed = {}
        for url in urls:
            self._versions.pop(url, None)
            if url in self.unreachable:
                failed[url] = f"engine {url} cannot be linked"
            else:
                self._versions[url] = None
        if failed:
            raise SyncError("; ".join(failed.values()), failed)

    async def sync(self, version: int, urls: Sequence[str] | None = None) -> SyncReport:
        chosen = self.linked if urls is None else tuple(urls)
        results = []
        for url in chosen:
            before = None if self._versions[url] is None else self._sent[url]
            changed = None if before is None else int(before != self._trainer.weight)
            self._sent[url] = self._trainer.weight
            self._engines[url].weight = self._trainer.weight + 0.5 * (url in self.corrupt)
            self._versions[url] = version
            is_verified = self.verifies and url not in self.corrupt
            results.append(
                EngineSyncResult(url, verified=is_verified, num_slices=1, num_changed=changed)
            )
        return SyncReport(version, 0.1, tuple(results))

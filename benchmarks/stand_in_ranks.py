"""Stand-ins for thousands of trainer ranks and for the engines that link to them.

They do what ranks do to link: the real senders, handshake, store, plan and transports, called by
the real controller. They hold no weights, trace no loader, and each tells of a GPU of its own on
one of many hosts. So their messages would go by NCCL, which connects with the first sync. Their
processes look for no garbage: one collection would go through the objects of a thousand ranks.
"""

import asyncio
import base64
import gc
import json
import multiprocessing as mp
import pickle
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.request import urlopen

import torch
from aiohttp import web

from mcore_rl.weight_sync.controller.engine_control import LOADER
from mcore_rl.weight_sync.execute import PlanExecutor
from mcore_rl.weight_sync.link_end import LinkEnd, await_roster
from mcore_rl.weight_sync.link_store import FACTS, publish_report, report_outcome
from mcore_rl.weight_sync.roster import RankFacts
from mcore_rl.weight_sync.sender import WeightSender
from mcore_rl.weight_sync.transports.select import select_transport
from mcore_rl.weight_sync.verify import ROWS
from mcore_rl.weight_sync.wire import Link, Report, decode_command
from mcore_rl.weights.box import Shard, contiguous_strides
from mcore_rl.weights.layouts.layout import Layout, list_boxes
from mcore_rl.weights.layouts.listed import RecordedLayouts
from mcore_rl.weights.layouts.megatron import MegatronSizes
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from mcore_rl.weights.lora.places import Content
from sync_model import DTYPE, make_config

RANKS_PER_HOST = 8
HOST = torch.device("cpu")


@dataclass(frozen=True)
class StandIns:
    """Sizes of both sides; `layers` of 256 experts each, which trainer ranks hold by EP = 64."""

    trainer_ranks: int
    engine_ranks: int
    layers: int

    def recorded(self) -> RecordedLayouts:
        heads = {"num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 16}
        config = {**make_config("tiny", self.layers), **heads}
        ep = min(64, self.trainer_ranks)
        return RecordedLayouts(
            config,
            str(DTYPE).removeprefix("torch."),
            MegatronSizes(config["vocab_size"], dp=self.trainer_ranks, ep=ep),
            SGLangSizes(1, self.engine_ranks, self.engine_ranks, 1, 1),
        )


class StandInTrainers:
    """The TrainerRanks that the controller calls, in two processes for all of them."""

    def __init__(self, sizes: StandIns) -> None:
        self.world_size = sizes.trainer_ranks
        context = mp.get_context("spawn")
        half = sizes.trainer_ranks // 2
        self._pipes, self._processes = [], []
        for ranks in (range(half), range(half, sizes.trainer_ranks)):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve_trainers, args=(theirs, sizes, ranks), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    async def describe(self, content: Content = "weights") -> Sequence[bytes]:
        return await self._call("describe")

    async def plan_links(self, offers: Sequence[tuple[Link, bytes]]) -> Sequence[Sequence[bytes]]:
        return await self._call("plan_links", offers)

    async def open_links(
        self, verdicts: Sequence[tuple[str, str]]
    ) -> Sequence[Sequence[str | Report]]:
        return await self._call("open_links", verdicts)

    async def send(self, version: int, engines: Sequence[str], timeout_s: float) -> Any:
        raise RuntimeError("stand-ins hold no weights")

    async def publish_sums(self, version: int, engines: Sequence[str]) -> None:
        raise RuntimeError("stand-ins hold no weights")

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    async def slowest_cpu_s(self) -> float:
        """Return the most CPU seconds that a rank used since the last call."""
        return max(await self._call("take_cpu_s"))

    async def _call(self, *call: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(call)
        halves = await asyncio.gather(*(asyncio.to_thread(pipe.recv) for pipe in self._pipes))
        return [answer for half in halves for answer in half]


def _serve_trainers(pipe: Any, sizes: StandIns, ranks: range) -> None:
    torch.set_num_threads(1)
    recorded = sizes.recorded()
    source = recorded.source()
    alike: dict[int, list[Shard]] = {}
    senders = []
    for rank in ranks:
        kind = rank % recorded.trainer.ep
        if kind not in alike:
            alike[kind] = _shards_of(source, rank)
        senders.append(WeightSender(alike[kind], {"none": torch.zeros(1)}, rank))
    gc.disable()
    pipe.send("ready")
    cpu_s = [0.0] * len(senders)
    while True:
        method, *args = pipe.recv()
        if method == "describe":
            pipe.send([_facts_of("trainer", rank).encode() for rank in ranks])
        elif method == "take_cpu_s":
            pipe.send(cpu_s)
            cpu_s = [0.0] * len(senders)
        else:
            answers = []
            # One rank after another, as no rank waits for another in these calls.
            for i, sender in enumerate(senders):
                before_s = time.process_time()
                answers.append(getattr(sender, method)(*args))
                cpu_s[i] += time.process_time() - before_s
            pipe.send(answers)


class StandInEngines:
    """Engines behind HTTP servers with SGLang's paths, in one process for all of them."""

    def __init__(self, sizes: StandIns, num_engines: int) -> None:
        context = mp.get_context("spawn")
        pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve_engines, args=(theirs, sizes, num_engines), daemon=True
        )
        self._process.start()
        self.urls: list[str] = pipe.recv()

    @property
    def pids(self) -> list[int]:
        return [self._process.pid or 0]

    def slowest_cpu_s(self) -> float:
        """Return the most CPU seconds that a rank used to link last."""
        answers = []
        for url in self.urls:
            with urlopen(f"{url}/slowest_cpu_s") as answer:
                answers.append(json.load(answer))
        return max(answers)

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def _serve_engines(pipe: Any, sizes: StandIns, num_engines: int) -> None:
    torch.set_num_threads(1)
    target = sizes.recorded().target()
    shards = [_shards_of(target, rank) for rank in range(sizes.engine_ranks)]
    threads = ThreadPoolExecutor(num_engines * sizes.engine_ranks)

    gc.disable()

    async def serve() -> None:
        urls = []
        for index in range(num_engines):
            engine = _StandInEngine(index, shards, threads)
            application = web.Application()
            application.router.add_route("*", "/{path:.*}", engine.answer)
            runner = web.AppRunner(application)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            urls.append("http://{}:{}".format(*runner.addresses[0][:2]))
        pipe.send(urls)
        await asyncio.Event().wait()

    asyncio.run(serve())


class _StandInEngine:
    def __init__(
        self, index: int, shards: Sequence[Sequence[Shard]], threads: ThreadPoolExecutor
    ) -> None:
        self._index = index
        self._shards = shards
        self._threads = threads
        self._executors: list[PlanExecutor | None] = [None] * len(shards)
        self._cpu_s = [0.0] * len(shards)

    async def answer(self, request: web.Request) -> web.Response:
        num_ranks = len(self._shards)
        if request.path == "/server_info":
            sizes = {"tp_size": num_ranks, "ep_size": num_ranks, "pp_size": 1, "attn_dp_size": 1}
            return web.json_response({"custom_weight_loader": [LOADER], **sizes})
        if request.path == "/slowest_cpu_s":
            return web.json_response(max(self._cpu_s))
        if request.path == "/update_weights_from_tensor":
            payloads = (await request.json())["serialized_named_tensors"]
            ((_, command_u8),) = pickle.loads(base64.b64decode(payloads[0]))
            link = decode_command(command_u8).link
            loop = asyncio.get_running_loop()
            ranks = range(num_ranks)
            await asyncio.gather(
                *(loop.run_in_executor(self._threads, self._connect, link, r) for r in ranks)
            )
        return web.json_response({"success": True})

    def _connect(self, link: Link, receiver: int) -> None:
        before_s = time.thread_time()
        rank = link.num_senders + receiver
        end = LinkEnd.open(link, rank, HOST)

        def act() -> Report:
            facts = _facts_of("engine", self._index * len(self._shards) + receiver)
            end.store.publish(FACTS, rank, facts.encode())
            met = await_roster(end)
            executor = PlanExecutor.meet(met, lambda _: self._shards[receiver], select_transport)
            self._executors[receiver] = executor
            return Report(end.name, executor.plan.digest, executor.num_bytes)

        publish_report(end.store, "connect", rank, report_outcome(end.name, act))
        self._cpu_s[receiver] = time.thread_time() - before_s


def _facts_of(side: str, rank: int) -> RankFacts:
    machine = f"{side} host {rank // RANKS_PER_HOST} with a boot id of thirty-six characters"
    gpus = tuple(f"GPU-{side}-{machine}-{i}" for i in range(RANKS_PER_HOST))
    return RankFacts(machine, (ROWS,), gpus[rank % RANKS_PER_HOST], gpus)


def _shards_of(layout: Layout, rank: int) -> list[Shard]:
    """Return the shards of a rank that holds every box in a tensor of its own."""
    return [
        Shard(box, box.name, 0, contiguous_strides(box.shape), dtype)
        for box, dtype in list_boxes(layout, rank)
    ]

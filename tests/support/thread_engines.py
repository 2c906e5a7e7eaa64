"""Trainer ranks and engines in threads of this process, called by the real SyncController.

An engine is an HTTP server with SGLang's paths and answers. Behind it run a WeightReceiver per
rank, and in each trainer rank a WeightSender, as in a run. So a sync takes milliseconds, without
SGLang and Megatron.
"""

import asyncio
import base64
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import torch
from aiohttp import web

from mcore_rl.device.gpu_memory import DeviceStream
from mcore_rl.tools.doctor.sync_ranks import FaultyTransport
from mcore_rl.tools.doctor.toy_engine import (
    TINY,
    Fault,
    FusedEngine,
    ToySizes,
    expert_cut,
    make_tensors,
)
from mcore_rl.weight_sync.controller.engine_control import LOADER
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.plan_handshake import RankPlan
from mcore_rl.weight_sync.receiver import WeightReceiver
from mcore_rl.weight_sync.sender import WeightSender
from mcore_rl.weight_sync.transports.select import select_transport
from mcore_rl.weight_sync.transports.transport import Transport
from mcore_rl.weight_sync.wire import Link, Report, decode_command
from mcore_rl.weights.lora.places import Content

FaultsByLink = dict[tuple[str, str], Fault]
"""(relay or "" for trainer ranks, engine) of a link -> a fault of the sender of that rank."""


Installed = tuple[str, int, Mapping[str, Any], Mapping[str, torch.Tensor]]


@dataclass
class ThreadEngine:
    """An engine of FusedEngine ranks; `refused` lists paths it answers with success=False.

    installed   versions of adapters that each rank is to serve: (name, version, config, factors)
    """

    models: list[FusedEngine]
    receivers: list[WeightReceiver]
    installed: list[list[Installed]]
    url: str = ""
    is_paused: bool = False
    is_updating: bool = False
    version: str = "default"
    calls: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)

    def holds(self, version: int) -> bool:
        """Whether each parameter is what the engine's loader makes of the weights of `version`."""
        for rank, model in enumerate(self.models):
            expected = FusedEngine(rank, len(self.models), model.norm.dtype, model.sizes)
            expected.load_weights(make_tensors(version, model.sizes).items())
            for name, wanted in expected.named_parameters():
                if not torch.equal(model.get_parameter(name), wanted):
                    return False
        return True

    async def answer(self, request: web.Request) -> web.Response:
        path = request.path
        self.calls.append(path)
        if path == "/server_info":
            sizes = {"tp_size": len(self.models), "ep_size": 1, "pp_size": 1, "attn_dp_size": 1}
            return web.json_response({"custom_weight_loader": [LOADER], **sizes})
        if path in self.refused:
            return web.json_response({"success": False, "message": "told to refuse"}, status=400)
        body = await request.json()
        if path == "/pause_generation":
            self.is_paused = True
        elif path == "/continue_generation":
            self.is_paused = False
        elif path == "/begin_weight_update":
            if self.is_updating:
                return web.json_response({"success": False, "message": "begun"}, status=400)
            self.is_updating = True
        elif path == "/end_weight_update":
            self.is_updating = False
        elif path == "/update_weights_from_tensor":
            await self._load(body["serialized_named_tensors"])
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        return web.json_response({"success": True})

    async def _load(self, payloads: Sequence[str]) -> None:
        """Run the custom weight loader in every rank."""

        def load(rank: int) -> None:
            ((_, command_u8),) = pickle.loads(base64.b64decode(payloads[rank]))
            model = self.models[rank]
            self.receivers[rank].handle(
                decode_command(command_u8), rank, model.load_weights, dict(model.named_parameters())
            )

        await asyncio.gather(*(asyncio.to_thread(load, rank) for rank in range(len(payloads))))


class ThreadTrainers:
    """The TrainerRanks that a SyncController calls; the experts are dealt out to them."""

    def __init__(self, num_ranks: int, faults: FaultsByLink, sizes: ToySizes = TINY) -> None:
        self.world_size = num_ranks
        self._sizes = sizes
        self.calls: list[str] = []
        """Methods of which a call went to all ranks."""
        self._tensors = []
        self._senders = []
        for rank in range(num_ranks):
            shards, tensors = expert_cut(make_tensors(0, sizes), rank, num_ranks, "float32")
            self._tensors.append(tensors)
            self._senders.append(WeightSender(shards, tensors, rank, make_faulty(faults)))

    def load(self, version: int) -> None:
        """Give the trainer ranks the weights of `version`, as a training step would."""
        for rank, tensors in enumerate(self._tensors):
            hf = make_tensors(version, self._sizes)
            newer = expert_cut(hf, rank, self.world_size, "float32")[1]
            for name, tensor in tensors.items():
                tensor.copy_(newer[name])

    async def describe(self, content: Content = "weights") -> Sequence[bytes]:
        return await self._call_all("describe", content)

    async def plan_links(self, offers: Sequence[tuple[Link, bytes]]) -> Sequence[Sequence[bytes]]:
        return await self._call_all("plan_links", offers)

    async def open_links(
        self, verdicts: Sequence[tuple[str, str]]
    ) -> Sequence[Sequence[str | Report]]:
        return await self._call_all("open_links", verdicts)

    async def send(
        self, version: int, engines: Sequence[str], timeout_s: float
    ) -> Sequence[Mapping[str, Report]]:
        return await self._call_all("send", version, engines, timeout_s)

    async def publish_sums(self, version: int, engines: Sequence[str]) -> object:
        return await self._call_all("publish_sums", version, engines)

    async def _call_all(self, method: str, *args: Any) -> list[Any]:
        self.calls.append(method)
        return await asyncio.gather(
            *(asyncio.to_thread(getattr(sender, method), *args) for sender in self._senders)
        )

    def disconnect(self, engine: str) -> None:
        for sender in self._senders:
            sender.disconnect(engine)


def make_faulty(faults: FaultsByLink) -> Any:
    def make_transport(end: LinkEnd, plan: RankPlan, stream: DeviceStream) -> Transport:
        transport = select_transport(end, plan, stream)
        fault = faults.get((end.link.relay, end.link.engine))
        if fault is None or fault.rank != end.rank:
            return transport
        return FaultyTransport(transport, plan, fault)

    return make_transport


@dataclass
class ThreadStage:
    """Trainer ranks, engines, and faults of their links, to be changed before a connect."""

    trainers: ThreadTrainers
    engines: list[ThreadEngine]
    faults: FaultsByLink

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self.engines]


@contextmanager
def open_thread_stage(
    *engine_sizes: int,
    num_trainers: int = 2,
    dtype: torch.dtype = torch.float32,
    sizes: ToySizes = TINY,
    make_trainers: Callable[[int, FaultsByLink, ToySizes], "ThreadTrainers"] | None = None,
) -> Iterator[ThreadStage]:
    """Serve an engine of so many ranks for each of `engine_sizes`; trainers hold float32."""
    faults: FaultsByLink = {}
    engines = []
    for num_ranks in engine_sizes:
        models = [FusedEngine(rank, num_ranks, dtype, sizes) for rank in range(num_ranks)]
        installed: list[list[Installed]] = [[] for _ in range(num_ranks)]
        receivers = [
            WeightReceiver(make_faulty(faults), lambda *adapter, own=own: own.append(adapter))
            for own in installed
        ]
        engines.append(ThreadEngine(models, receivers, installed))
    loop = asyncio.new_event_loop()
    runners = [loop.run_until_complete(serve(engine)) for engine in engines]
    thread = Thread(target=loop.run_forever, daemon=True)
    thread.start()
    trainers = (make_trainers or ThreadTrainers)(num_trainers, faults, sizes)
    stage = ThreadStage(trainers, engines, faults)
    try:
        yield stage
    finally:
        for engine in engines:
            stage.trainers.disconnect(engine.url)
            for receiver in engine.receivers:
                receiver.close()
        for runner in runners:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def serve(engine: ThreadEngine) -> web.AppRunner:
    """Serve `engine` on a free port and set its url."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", engine.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    engine.url = f"http://{host}:{port}"
    return runner

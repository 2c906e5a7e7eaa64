"""Trainer ranks as plain processes, which hold a checkpoint as Megatron cuts it."""

import asyncio
import json
import multiprocessing as mp
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mcore_rl.device.gpu_memory import DeviceStream
from mcore_rl.tools.doctor.sync_ranks import FaultyTransport
from mcore_rl.tools.doctor.toy_engine import Fault
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.plan_handshake import RankPlan
from mcore_rl.weight_sync.sender import WeightSender
from mcore_rl.weight_sync.transports.select import select_transport
from mcore_rl.weight_sync.transports.transport import Transport
from mcore_rl.weight_sync.wire import Link, Report
from mcore_rl.weights.layouts.training import make_training_shards
from mcore_rl.weights.lora.places import Content
from mcore_rl.weights.models import family_of
from tests.support.megatron_layout import TrainLayout, train_ranks
from tests.support.rank_calls import answer_calls


class ProcessRanks:
    """The TrainerRanks that the real SyncController calls; `load` stands for a training step."""

    def __init__(self, layout: TrainLayout) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "tests.support.trainer_processes"])
        self.world_size = layout.world_size
        self._pipes = []
        self.processes = []
        for rank in range(layout.world_size):
            own_end, child_end = context.Pipe()
            self.processes.append(
                context.Process(target=_serve, args=(child_end, layout, rank), daemon=True)
            )
            self.processes[-1].start()
            child_end.close()
            self._pipes.append(own_end)

    def load(self, hf_dir: Path) -> None:
        asyncio.run(self._call_all("load", hf_dir))

    def inject(self, engine: str, fault: Fault) -> None:
        """Have the fault happen on its rank over the next link to `engine`."""
        asyncio.run(self._call_all("inject", engine, fault))

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

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    async def _call_all(self, *call: Any) -> list[Any]:
        return await asyncio.gather(
            *(asyncio.to_thread(self._call, rank, call) for rank in range(self.world_size))
        )

    def _call(self, rank: int, call: tuple[Any, ...]) -> Any:
        try:
            self._pipes[rank].send_bytes(pickle.dumps(call))
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise RuntimeError(f"trainer rank {rank} died") from error


class _Rank:
    """A trainer rank, in its process."""

    def __init__(self, layout: TrainLayout, rank: int) -> None:
        self._layout = layout
        self._rank = rank
        self._tensors: dict[str, torch.Tensor] = {}
        self._faults: dict[str, Fault] = {}
        self._sender: WeightSender | None = None

    def load(self, hf_dir: Path) -> None:
        config = json.loads((hf_dir / "config.json").read_text())
        config["num_experts"] = config["num_local_experts"]
        own = train_ranks(config, load_file(hf_dir / "model.safetensors"), self._layout)[self._rank]
        if self._sender is None:
            self._tensors = own.tensors
            shards = make_training_shards(own.parts, family_of(config), config)
            self._sender = WeightSender(shards, self._tensors, self._rank, self._make_transport)
        for name, tensor in own.tensors.items():
            self._tensors[name].copy_(tensor)

    def inject(self, engine: str, fault: Fault) -> None:
        self._faults[engine] = fault

    def describe(self, content: Content) -> bytes:
        assert self._sender is not None
        return self._sender.describe(content)

    def plan_links(self, offers: Sequence[tuple[Link, bytes]]) -> list[bytes]:
        assert self._sender is not None
        return self._sender.plan_links(offers)

    def open_links(self, verdicts: Sequence[tuple[str, str]]) -> list[str | Report]:
        assert self._sender is not None
        return self._sender.open_links(verdicts)

    def send(self, version: int, engines: Sequence[str], timeout_s: float) -> dict[str, Report]:
        assert self._sender is not None
        return self._sender.send(version, engines, timeout_s)

    def _make_transport(self, end: LinkEnd, plan: RankPlan, stream: DeviceStream) -> Transport:
        transport = select_transport(end, plan, stream)
        fault = self._faults.pop(end.link.engine, None)
        if fault is None or fault.rank != self._rank:
            return transport
        return FaultyTransport(transport, plan, fault)


def _serve(pipe: Any, layout: TrainLayout, rank: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    served = _Rank(layout, rank)
    answer_calls(pipe, served)

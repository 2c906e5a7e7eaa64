"""Runs trainer ranks as plain processes, which send weights by this system or by the baselines."""

import asyncio
import json
import multiprocessing as mp
import os
import pickle
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed
from torch.distributed import distributed_c10d as c10d

from mcore_rl.device import device, set_local_device
from mcore_rl.weight_sync.sender import WeightSender
from mcore_rl.weight_sync.wire import Report
from mcore_rl.weights.box import Shard
from mcore_rl.weights.layouts.training import make_training_shards
from mcore_rl.weights.lora.places import Content
from mcore_rl.weights.models.qwen_llama_mixtral import QWEN3_MOE
from sync_model import local_tensors

BROADCAST_GROUP = "weight_update_group"
BUCKET_BYTES = 512 * 2**20
"""slime's default of --update-weight-buffer-size."""
TIMEOUT = timedelta(seconds=600)


class BenchRanks:
    """The trainer ranks that a SyncController calls, and those of the baselines."""

    def __init__(
        self,
        config: dict[str, Any],
        world_size: int,
        timeout_s: float = 600.0,
        rank_class: type["BenchRank"] | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        context = mp.get_context("spawn")
        self.world_size = world_size
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            args = (theirs, rank_class or BenchRank, config, rank, world_size)
            self._processes.append(context.Process(target=_serve, args=args, daemon=True))
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(ours)

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def call(self, method: str, *args: Any) -> list[Any]:
        return asyncio.run(self.call_async(method, *args))

    async def call_async(self, method: str, *args: Any) -> list[Any]:
        calls = (
            asyncio.to_thread(self._call, rank, (method, *args)) for rank in range(self.world_size)
        )
        return await asyncio.gather(*calls)

    async def describe(self, content: Content = "weights") -> Sequence[bytes]:
        return await self.call_async("describe", content)

    async def plan_links(self, offers: Any) -> Sequence[Sequence[bytes]]:
        return await self.call_async("plan_links", offers)

    async def open_links(self, verdicts: Any) -> Sequence[Sequence[Report]]:
        return await self.call_async("open_links", verdicts)

    async def send(
        self, version: int, engines: Sequence[str], timeout_s: float
    ) -> Sequence[Mapping[str, Report]]:
        return await self.call_async("send", version, engines, timeout_s)

    async def publish_sums(self, version: int, engines: Sequence[str]) -> object:
        return await self.call_async("publish_sums", version, engines)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _call(self, rank: int, call: tuple[Any, ...]) -> Any:
        try:
            self._pipes[rank].send_bytes(pickle.dumps(call))
            if not self._pipes[rank].poll(self.timeout_s):
                raise RuntimeError(
                    f"trainer rank {rank} did not answer {call[0]} in {self.timeout_s:.0f} s"
                )
            succeeded, answer = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise RuntimeError(f"trainer rank {rank} died") from error
        if not succeeded:
            raise RuntimeError(f"trainer rank {rank}: {answer}")
        return answer


def _serve(
    pipe: Any, rank_class: type["BenchRank"], config: dict[str, Any], rank: int, world_size: int
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    served = rank_class(config, rank, world_size)
    while True:
        try:
            method, *args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            callee = served if hasattr(served, method) else served.sender
            answer = (True, getattr(callee, method)(*args))
        except (RuntimeError, ValueError, OSError) as error:
            answer = (False, repr(error))
        pipe.send_bytes(pickle.dumps(answer))


class BenchRank:
    def __init__(self, config: dict[str, Any], rank: int, world_size: int) -> None:
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._layouts = [local_tensors(config, other, world_size) for other in range(world_size)]
        set_local_device(rank)
        self._tensors = {t.part.tensor: t.make().to(device()) for t in self._layouts[rank]}
        shards = make_training_shards([t.part for t in self._layouts[rank]], QWEN3_MOE, config)
        self.sender = WeightSender(shards, self._tensors, rank)
        self._hf: dict[str, Tensor] = {}

    def flip_sign(self) -> None:
        """Change every weight, as a training step would."""
        for tensor in self._tensors.values():
            tensor.neg_()

    def join_trainers(self, port: int) -> None:
        distributed.init_process_group(
            "gloo",
            f"tcp://127.0.0.1:{port}",
            rank=self._rank,
            world_size=self._world_size,
            timeout=TIMEOUT,
        )

    def join_engine(self, url: str, engine_ranks: int, port: int) -> None:
        """Form SGLang's group for updates from rank 0 and the engine's ranks."""
        self._engine_ranks = engine_ranks
        if self._rank == 0:
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(
                    post,
                    url,
                    "/init_weights_update_group",
                    master_address="127.0.0.1",
                    master_port=port,
                    rank_offset=1,
                    world_size=1 + engine_ranks,
                    group_name=BROADCAST_GROUP,
                    backend="gloo",
                )
                self._group = _beside_default_group(f"tcp://127.0.0.1:{port}", 1 + engine_ranks)
                answer.result()

    def count_engine_ranks(self, engine_ranks: int) -> None:
        """Note the engine's ranks, where no update travels in a group with them."""
        self._engine_ranks = engine_ranks

    def gather_and_broadcast(self, url: str) -> float:
        """Gather each parameter, convert and broadcast it; return the seconds it took."""
        distributed.barrier()
        began_s = time.perf_counter()
        if self._rank == 0:
            open_update(url)
        for bucket in buckets_of(self._gathered()):
            if self._rank == 0:
                self.broadcast_bucket(url, bucket)
        if self._rank == 0:
            close_update(url)
        return time.perf_counter() - began_s

    def prepare_whole_model(self, folder: str | None) -> None:
        """Gather all HF tensors on rank 0, which also writes them to `folder`, if given."""
        whole = {name: tensor for name, tensor in self._gathered() if self._rank == 0}
        if folder is not None and self._rank == 0:
            save_file(whole, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        self._hf = whole

    def broadcast(self, url: str) -> float:
        """Update by SGLang's own means from tensors that rank 0 holds; return the seconds."""
        began_s = time.perf_counter()
        if self._rank == 0:
            open_update(url)
            for bucket in buckets_of(self._hf.items()):
                self.broadcast_bucket(url, bucket)
            close_update(url)
        return time.perf_counter() - began_s

    def forget_whole_model(self) -> None:
        self._hf = {}

    def broadcast_bucket(self, url: str, bucket: list[tuple[str, Tensor]]) -> None:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(
                post,
                url,
                "/update_weights_from_distributed",
                names=[name for name, _ in bucket],
                dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                shapes=[list(tensor.shape) for _, tensor in bucket],
                group_name=BROADCAST_GROUP,
            )
            works = [
                distributed.broadcast(t, 0, group=self._group, async_op=True) for _, t in bucket
            ]
            for work in works:
                work.wait()  # type: ignore[union-attr]
            answer.result()

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Yield HF tensors on rank 0, each once its last part has come; other ranks only send."""
        filled: dict[str, tuple[Tensor, int]] = {}
        shapes = QWEN3_MOE.shapes(self._config)
        for by_rank in zip(*self._layouts, strict=True):
            mine = self._tensors[by_rank[self._rank].part.tensor]
            holders = list(by_rank[:1])
            parts = [mine]
            if by_rank[0].is_sharded:
                holders = list(by_rank)
                parts = [torch.empty_like(mine) for _ in by_rank]
                distributed.all_gather(parts, mine)
            if self._rank != 0:
                continue
            for holder, part in zip(holders, parts, strict=True):
                for shard in make_training_shards([holder.part], QWEN3_MOE, self._config):
                    name = shard.box.name
                    if name not in filled:
                        filled[name] = (torch.empty(shapes[name], dtype=mine.dtype), 0)
                    whole, numel = filled[name]
                    box_of(whole, shard).copy_(shard.view({shard.tensor: part}))
                    filled[name] = (whole, numel + shard.box.numel)
                    if filled[name][1] == whole.numel():
                        yield name, filled.pop(name)[0]
        assert not filled, f"parts of {list(filled)} never came"


def box_of(whole: Tensor, shard: Shard) -> Tensor:
    return whole[tuple(slice(a, b) for a, b in zip(shard.box.start, shard.box.stop, strict=True))]


def buckets_of(tensors: Any) -> Iterator[list[tuple[str, Tensor]]]:
    """Group (name, tensor) pairs into buckets of at most BUCKET_BYTES, or of one tensor."""
    bucket: list[tuple[str, Tensor]] = []
    filled_bytes = 0
    for name, tensor in tensors:
        if bucket and filled_bytes + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = []
            filled_bytes = 0
        bucket.append((name, tensor))
        filled_bytes += tensor.nbytes
    if bucket:
        yield bucket


def open_update(url: str) -> None:
    post(url, "/pause_generation", mode="retract")
    post(url, "/begin_weight_update", selector="target")


def close_update(url: str) -> None:
    post(url, "/end_weight_update")
    post(url, "/continue_generation")


def post(url: str, path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT.total_seconds()) as response:
        answer = json.loads(response.read())
    assert answer.get("success", True), answer
    return answer


def _beside_default_group(init_method: str, world_size: int) -> Any:
    """Join, as rank 0, a group made like that of SGLang's init_custom_process_group."""
    rendezvous: Any = c10d.rendezvous  # pyright: ignore[reportPrivateImportUsage]
    store, rank, world_size = next(rendezvous(init_method, 0, world_size, timeout=TIMEOUT))
    helper: Any = c10d._new_process_group_helper
    group, _ = helper(
        world_size,
        rank,
        [],
        c10d.Backend("gloo"),
        c10d.PrefixStore(BROADCAST_GROUP, store),  # type: ignore[attr-defined]
        group_name=BROADCAST_GROUP,
        backend_options=None,
        timeout=TIMEOUT,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group

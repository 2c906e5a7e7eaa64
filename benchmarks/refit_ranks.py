"""A trainer rank that also sends weights in the ways of other systems, on one host.

All ways gather with asynchronous calls: the parts of a bucket's worth of tensors are asked for at
once, as slime does for experts. Each bucket is then one flat tensor, which SGLang takes apart.
"""

import base64
import importlib.util
import io
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor, distributed

from mcore_rl.device import synchronize
from mcore_rl.weights.layouts.training import make_training_shards
from mcore_rl.weights.models.qwen_llama_mixtral import QWEN3_MOE
from sync_trainer import (
    BROADCAST_GROUP,
    BUCKET_BYTES,
    BenchRank,
    box_of,
    buckets_of,
    close_update,
    open_update,
    post,
)

Named = list[tuple[str, Tensor]]


class RefitRank(BenchRank):
    """Its ways return the seconds they took, from an open barrier to the engine's last answer."""

    def each_tensor(self, url: str) -> float:
        """Broadcast each tensor by itself, as slime does."""
        return self._update(url, self.broadcast_bucket)

    def flat_broadcast(self, url: str) -> float:
        """Broadcast each bucket as one tensor (update_weights_from_distributed)."""
        return self._update(url, self._broadcast_flat)

    def flat_shared_memory(self, url: str) -> float:
        """Hand each bucket over in memory that both processes see (update_weights_from_tensor).

        On a GPU that is the trainer's own memory, by CUDA IPC.
        """
        torch.multiprocessing.set_sharing_strategy("file_system")
        return self._update(url, self._share_flat)

    def _update(self, url: str, send: Callable[[str, Named], None]) -> float:
        synchronize()
        distributed.barrier()
        began_s = time.perf_counter()
        if self._rank == 0:
            open_update(url)
        for bucket in buckets_of(self._gathered_at_once()):
            if self._rank == 0:
                send(url, bucket)
        if self._rank == 0:
            close_update(url)
        distributed.barrier()
        return time.perf_counter() - began_s

    def _gathered_at_once(self) -> Iterator[tuple[str, Tensor]]:
        """Yield HF tensors on rank 0, as gathers end; a bucket's worth of them is under way."""
        filled: dict[str, tuple[Tensor, int]] = {}
        waiting: list[tuple[Any, list[Any], list[Tensor]]] = []
        waiting_bytes = 0
        for by_rank in zip(*self._layouts, strict=True):
            mine = self._tensors[by_rank[self._rank].part.tensor]
            if by_rank[0].is_sharded:
                parts = [torch.empty_like(mine) for _ in by_rank]
                work = distributed.all_gather(parts, mine, async_op=True)
                waiting.append((work, list(by_rank), parts))
            else:
                waiting.append((None, list(by_rank[:1]), [mine]))
            waiting_bytes += mine.nbytes * len(waiting[-1][2])
            if waiting_bytes > BUCKET_BYTES:
                yield from self._finished(waiting, filled)
                waiting = []
                waiting_bytes = 0
        yield from self._finished(waiting, filled)
        assert not filled, f"parts of {list(filled)} never came"

    def _finished(
        self, waiting: list[tuple[Any, list[Any], list[Tensor]]], filled: dict[str, Any]
    ) -> Iterator[tuple[str, Tensor]]:
        shapes = QWEN3_MOE.shapes(self._config)
        for work, holders, parts in waiting:
            if work is not None:
                work.wait()
            if self._rank != 0:
                continue
            for holder, part in zip(holders, parts, strict=True):
                for shard in make_training_shards([holder.part], QWEN3_MOE, self._config):
                    name = shard.box.name
                    if shard.box.shape == shapes[name]:
                        yield name, shard.view({shard.tensor: part})
                        continue
                    if name not in filled:
                        filled[name] = (torch.empty(shapes[name], dtype=part.dtype), 0)
                    whole, numel = filled[name]
                    box_of(whole, shard).copy_(shard.view({shard.tensor: part}))
                    filled[name] = (whole, numel + shard.box.numel)
                    if filled[name][1] == whole.numel():
                        yield name, filled.pop(name)[0]

    def _broadcast_flat(self, url: str, bucket: Named) -> None:
        flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in bucket])
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(
                post,
                url,
                "/update_weights_from_distributed",
                names=[name for name, _ in bucket],
                dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                shapes=[list(tensor.shape) for _, tensor in bucket],
                group_name=BROADCAST_GROUP,
                load_format="flattened_bucket",
            )
            distributed.broadcast(flat, 0, group=self._group)
            answer.result()

    def _share_flat(self, url: str, bucket: Named) -> None:
        flat = sglang_buckets().FlattenedTensorBucket(named_tensors=bucket)
        payload = {"flattened_tensor": flat.flattened_tensor, "metadata": flat.metadata}
        data = io.BytesIO()
        ForkingPickler(data, pickle.HIGHEST_PROTOCOL).dump(payload)
        text = base64.b64encode(data.getvalue()).decode()
        post(
            url,
            "/update_weights_from_tensor",
            serialized_named_tensors=[text] * self._engine_ranks,
            load_format="flattened_bucket",
            selector="target",
            flush_cache=False,
        )


def sglang_buckets() -> Any:
    """Import SGLang's module of flat buckets by itself: the package needs CUDA or stand-ins.

    The modules above it are left empty; pickle asks for them by name.
    """
    name = "sglang.srt.weight_sync.tensor_bucket"
    if name not in sys.modules:
        package = importlib.util.find_spec("sglang")
        assert package is not None and package.submodule_search_locations
        path = Path(package.submodule_search_locations[0]) / "srt/weight_sync/tensor_bucket.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, f"no module at {path}"
        module = importlib.util.module_from_spec(spec)
        for parent in ("sglang", "sglang.srt", "sglang.srt.weight_sync"):
            sys.modules[parent] = ModuleType(parent)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]

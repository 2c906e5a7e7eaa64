"""Compares a sync of low-rank factors with one of all weights, and with an adapter's file.

    python benchmarks/lora.py

Two trainer ranks (TP = EP = 2) hold a model with experts of Moonlight-16B-A3B's shape, in float32,
and one SGLang engine serves it, all on this machine. Three ways take turns to bring it a step:

    factors   A and B travel; the engine merges them into the weights that it keeps
    merged    all weights travel, merged by the trainer
    file      ranks gather A and B on rank 0, which writes them as PEFT does; the file is then read
              once, without what an engine would do with it. The same merge is added to it.

The engine's weights are compared after each of the first two. The last line is JSON.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed

from mcore_rl.config import LoraConfig
from mcore_rl.process.network import find_free_port
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.weight_sync.controller.engine_control import LOADER
from mcore_rl.weight_sync.controller.factor_sync import FactorOptions
from mcore_rl.weight_sync.controller.sync import SyncController, SyncReport
from mcore_rl.weight_sync.sender import WeightSender
from mcore_rl.weights.box import Shard
from mcore_rl.weights.layouts.training import make_training_shards
from mcore_rl.weights.lora.facts import AdapterFacts, spell_key
from mcore_rl.weights.lora.places import Content, Held, make_stamp_shard, make_whole_factors
from mcore_rl.weights.lora.product import add_product
from mcore_rl.weights.models import hf_tensor_shapes
from mcore_rl.weights.models.qwen_llama_mixtral import QWEN3_MOE
from sync import post
from sync_model import DTYPE, SHAPES, make_config
from sync_trainer import BenchRank, BenchRanks

os.environ.setdefault("OMP_NUM_THREADS", "1")
SHAPES["moonlight"] = {"hidden": 2048, "ffn": 1408, "experts": 8}
BASE = "00" * 32
FACTORS, MERGED, FILE = "factors", "merged", "file"
NUM_RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", default="moonlight", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5, help="syncs of each kind and turn")
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = {**make_config(args.kind, args.layers), "lora_rank": args.rank}
    with tempfile.TemporaryDirectory(prefix="lora_") as folder:
        print(json.dumps(compare(config, Path(folder), args)))


def make_facts(config: dict[str, Any]) -> AdapterFacts:
    return AdapterFacts.make(LoraConfig(rank=config["lora_rank"]), config, BASE, "")


def compare(config: dict[str, Any], folder: Path, args: argparse.Namespace) -> dict[str, float]:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    ranks = BenchRanks(config, NUM_RANKS, rank_class=LoraRank)
    spec = EngineSpec(
        str(model),
        str(folder / "engine.log"),
        kv_cache_len=4096,
        max_running=8,
        custom_weight_loaders=(LOADER,),
        extra_args=("--load-format", "dummy"),
    )
    try:
        ranks.call("join_trainers", find_free_port("127.0.0.1"))
        with EngineProcess(spec) as engine:
            return report(measure(config, engine.url, ranks, folder, args))
    finally:
        ranks.stop()


def measure(
    config: dict[str, Any], url: str, ranks: BenchRanks, folder: Path, args: argparse.Namespace
) -> dict[str, list[Any]]:
    """Return the reports of syncs of both kinds, and the seconds of files."""
    options = FactorOptions(make_facts(config).make_stamp(config))
    measured: dict[str, list[Any]] = {FACTORS: [], MERGED: [], FILE: []}
    version = 0
    for _ in range(args.turns):
        for kind, factors in ((FACTORS, (options,)), (MERGED, ())):
            controller = SyncController(ranks, timeout_s=300, trace_all=True, factors=factors)
            asyncio.run(controller.connect([url]))
            for repeat in range(args.repeats + 1):
                version += 1
                ranks.call("take_step", version)
                result = asyncio.run(controller.sync(version))
                if repeat:  # the first sync of a link brings all weights
                    measured[kind].append(result)
            ranks.call("take_step", 0)
            asyncio.run(controller.sync(version + 1))
            checked = post(url, "/weights_checker", action="checksum")["ranks"]
            measured.setdefault("checksums", []).append([rank["checksums"] for rank in checked])
            version += 1
        for _ in range(args.repeats):
            measured[FILE].append(ranks.call("write_file", str(folder))[0])
    same = measured.pop("checksums")
    assert all(each == same[0] for each in same), "both kinds leave the same weights"
    return measured


def report(measured: dict[str, list[Any]]) -> dict[str, float]:
    """Print a table and return its figures."""
    by_kind: dict[str, dict[str, float]] = {}
    for kind in (FACTORS, MERGED):
        reports: list[SyncReport] = measured[kind]
        engines = [result.engines[0] for result in reports]
        by_kind[kind] = {
            "seconds": median(each.seconds for each in reports),
            "transfer_seconds": median(each.transfer_seconds for each in engines),
            "pause_seconds": median(each.pause_seconds for each in engines),
            "mib": engines[0].num_bytes / 2**20,
        }
    merge_s = median(each["merge"] for each in measured[FILE])
    file_s = median(each["gather"] + each["write"] + each["read"] for each in measured[FILE])
    by_kind[FILE] = {"transfer_seconds": file_s, "merge_seconds": merge_s}
    for kind, figures in by_kind.items():
        print(kind, {name: round(value, 4) for name, value in figures.items()}, flush=True)
    ours, whole = by_kind[FACTORS], by_kind[MERGED]
    figures = {
        f"{kind}_{name}": value for kind, own in by_kind.items() for name, value in own.items()
    }
    figures |= {
        "times_fewer_bytes": whole["mib"] / ours["mib"],
        "seconds_of_merged": whole["seconds"] / ours["seconds"],
        "transfer_vs_file": file_s / ours["transfer_seconds"],
        "seconds_vs_file": (file_s + merge_s) / ours["seconds"],
    }
    return {name: round(value, 4) for name, value in figures.items()}


class LoraRank(BenchRank):
    """A trainer rank. It has factors of each adapted matrix, if it holds a part of the matrix."""

    def __init__(self, config: dict[str, Any], rank: int, world_size: int) -> None:
        super().__init__(config, rank, world_size)
        facts = make_facts(config)
        self._scale = facts.scale
        shapes = hf_tensor_shapes(config)
        wanted = {key[:-2] for key in facts.list_factor_shapes(config)}
        parts = [tensor.part for tensor in self._layouts[rank]]
        shards = make_training_shards(parts, QWEN3_MOE, config)
        self._own = [shard for shard in shards if shard.box.name in wanted]
        self._base = {shard.tensor: self._tensors[shard.tensor].clone() for shard in self._own}
        self._factors: dict[str, Tensor] = {}
        places: list[Shard] = [make_stamp_shard("stamp")]
        dtype = str(DTYPE).removeprefix("torch.")
        for name in dict.fromkeys(shard.box.name for shard in self._own):
            generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
            num_rows, num_columns = shapes[name]
            for letter, shape in (("A", (facts.rank, num_columns)), ("B", (num_rows, facts.rank))):
                factor = torch.empty(shape, dtype=DTYPE).uniform_(-0.1, 0.1, generator=generator)
                self._factors[f"{name}.{letter}"] = factor
            both = f"{name}.A", f"{name}.B"
            places += make_whole_factors(name, shapes[name], facts.rank, both, dtype)
        stamp = torch.tensor(facts.make_stamp(config).encode())
        adapter: dict[Content, Held] = {
            "base": (self._own, self._base),
            "factors": (places, {"stamp": stamp, **self._factors}),
        }
        self.sender = WeightSender(shards, self._tensors, rank, adapter=adapter)

    def take_step(self, step: int) -> float:
        """Change all factors and merge them; return the seconds that merging took."""
        for key, factor in self._factors.items():
            generator = torch.Generator().manual_seed(step + sum(map(ord, key)))
            factor.uniform_(-0.1, 0.1, generator=generator)
        return self._merge()

    def _merge(self) -> float:
        began_s = time.perf_counter()
        for name, base in self._base.items():
            self._tensors[name].copy_(base)
        for shard in self._own:
            rows, columns = map(slice, shard.box.start, shard.box.stop)
            name = shard.box.name
            a, b = self._factors[f"{name}.A"], self._factors[f"{name}.B"]
            add_product(shard.view(self._tensors), a[:, columns], b[rows], self._scale)
        return time.perf_counter() - began_s

    def write_file(self, folder: str) -> dict[str, float]:
        """Gather factors on rank 0, write them and read the file; return the seconds of each."""
        distributed.barrier()
        began_s = time.perf_counter()
        # Ranks of one tensor-parallel group hold the same factors of attention.
        own = [key for key in self._factors if self._rank == 0 or ".experts." in key]
        flat = torch.cat([self._factors[key].view(-1) for key in own])
        gathered = self._gather(flat)
        seconds = {"gather": time.perf_counter() - began_s}
        if self._rank == 0:
            path = Path(folder) / "adapter_model.safetensors"
            began_s = time.perf_counter()
            save_file(self._name(own, gathered), path, metadata={"format": "pt"})
            seconds["write"] = time.perf_counter() - began_s
            began_s = time.perf_counter()
            sum(float(tensor.view(-1)[0]) for tensor in load_file(path).values())
            seconds["read"] = time.perf_counter() - began_s
        seconds["merge"] = NUM_RANKS * self._merge()  # one engine rank holds all of the model
        return seconds

    def _gather(self, flat: Tensor) -> list[Tensor]:
        sizes: list[Any] = [None] * self._world_size
        distributed.all_gather_object(sizes, len(flat))
        if self._rank:
            distributed.send(flat, 0)
            return []
        others = [torch.empty(size, dtype=flat.dtype) for size in sizes[1:]]
        for other, into in enumerate(others, start=1):
            distributed.recv(into, other)
        return [flat, *others]

    def _name(self, own: list[str], gathered: list[Tensor]) -> dict[str, Tensor]:
        """Return factors by PEFT's names; other ranks' experts are numbered after this rank's."""
        named: dict[str, Tensor] = {}
        experts = [key for key in own if ".experts." in key]
        for rank, flat in enumerate(gathered):
            keys = own if rank == 0 else experts
            parts = flat.split([self._factors[key].numel() for key in keys])
            for key, part in zip(keys, parts, strict=True):
                named[f"{spell_key(key)}.{rank}"] = part.view(self._factors[key].shape).contiguous()
        return named


if __name__ == "__main__":
    main()

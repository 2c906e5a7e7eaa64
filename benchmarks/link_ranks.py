"""Measures what a rank computes for a link besides tracing, by the number of tensors and of ranks.

The ranks are threads of this process, with the real handshake and store, and shards as their
layouts say: the check of the recorded layouts, the plan, its digests, its buckets and where these
lie. Trainer ranks have EP = their number, an engine's ranks TP = EP = theirs. CPU seconds of the
slowest rank of each side, in the best of some links. The last line is JSON.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from mcore_rl.process.gc_pause import pause_collections
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.link_store import LinkStore
from mcore_rl.weight_sync.plan_handshake import PlanHandshake
from mcore_rl.weight_sync.wire import Link
from mcore_rl.weights.box import Shard, contiguous_strides
from mcore_rl.weights.layouts.layout import Layout, list_boxes
from mcore_rl.weights.layouts.listed import RecordedLayouts
from mcore_rl.weights.layouts.megatron import MegatronSizes
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from sync_model import DTYPE, make_config

TIMEOUT_S = 300.0
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
"""As many as the largest engine has ranks."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="15,29,58", help="58 have DeepSeek-V3's experts")
    parser.add_argument("--trainers", default="1,2,4,8", help="numbers of trainer ranks")
    parser.add_argument("--engines", default="1,2,4", help="numbers of an engine's ranks")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(f"{'experts, ranks':>28s}{'trainer rank, s':>18s}{'engine rank, s':>18s}")
    figures = {}
    for layers in map(int, args.layers.split(",")):
        for num_senders in map(int, args.trainers.split(",")):
            for num_receivers in map(int, args.engines.split(",")):
                config = {**make_config("tiny", layers), **HEADS}
                name = f"{3 * layers * config['num_experts']} {num_senders}->{num_receivers}"
                sides = num_senders, num_receivers
                trainer_s, engine_s = measure(config, *sides, args.repeats)
                figures[name] = {"trainer_s": trainer_s, "engine_s": engine_s}
                print(f"{name:>28s}{trainer_s:18.3f}{engine_s:18.3f}", flush=True)
    print(json.dumps(figures))


def measure(
    config: dict[str, Any], num_senders: int, num_receivers: int, repeats: int
) -> tuple[float, float]:
    """Return the CPU seconds of the slowest trainer rank and of the slowest engine rank."""
    recorded = RecordedLayouts(
        config,
        str(DTYPE).removeprefix("torch."),
        MegatronSizes(config["vocab_size"], dp=num_senders, ep=num_senders),
        SGLangSizes(1, num_receivers, num_receivers, 1, 1),
    )
    shards = [shards_of(recorded.source(), rank) for rank in range(num_senders)]
    shards += [shards_of(recorded.target(), rank) for rank in range(num_receivers)]
    trainer_s = []
    engine_s = []
    for _ in range(repeats):
        with pause_collections():
            seconds = link(recorded, shards, num_senders, num_receivers)
        trainer_s.append(max(seconds[:num_senders]))
        engine_s.append(max(seconds[num_senders:]))
    return round(min(trainer_s), 4), round(min(engine_s), 4)


def shards_of(layout: Layout, rank: int) -> list[Shard]:
    """Return the shards of a rank that holds every box in a tensor of its own."""
    return [
        Shard(box, box.name, 0, contiguous_strides(box.shape), dtype)
        for box, dtype in list_boxes(layout, rank)
    ]


def link(
    recorded: RecordedLayouts, shards: Sequence[Sequence[Shard]], senders: int, receivers: int
) -> list[float]:
    """Return the CPU seconds that each rank takes to link, trainer ranks first."""
    store = LinkStore.serve("127.0.0.1", TIMEOUT_S)
    joined = Link(
        engine="engine",
        store_host="127.0.0.1",
        store_port=store.port,
        store_key=store.key,
        num_senders=senders,
        num_receivers=receivers,
        bucket_bytes=4 << 20,
        timeout_s=TIMEOUT_S,
        layouts=recorded.encode(),
    )

    store.keep(joined)

    def act(rank: int) -> Callable[[], float]:
        end = LinkEnd.open(joined, rank, torch.device("cpu"))
        return lambda: plan(end, shards[rank])

    with ThreadPoolExecutor(senders + receivers) as pool:
        futures = [pool.submit(act(rank)) for rank in range(senders + receivers)]
        return [future.result() for future in futures]


def plan(end: LinkEnd, shards: Sequence[Shard]) -> float:
    began_s = time.thread_time()
    made = PlanHandshake(end, lambda _: shards).run()
    assert made.digest.startswith("recorded"), made.digest
    return time.thread_time() - began_s


if __name__ == "__main__":
    main()

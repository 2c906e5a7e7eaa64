"""Measures what the controller carries of one step's samples, from the engines to trainer ranks.

    --path stores   collectors keep the samples, ranks read their share (the product's path)
    --path here     the controller parses all answers and hands micro-batches on (the path before)

Engines are servers that answer at once in SGLang's wire format. The defaults are 1/64 of a step of
1,024 prompts, 16 samples each of 8,192 tokens, of a model with 48 layers and 8 of 128 experts. The
last line is JSON.
"""

import argparse
import json
import os
import pickle
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from mcore_rl.algo.estimator import Advantages
from mcore_rl.batches.local_stores import LocalStores
from mcore_rl.batches.packing import plan_microbatches
from mcore_rl.batches.stored_batch import in_parts, make_stored_batch, with_stored_weights
from mcore_rl.cluster.group import RankGroup
from mcore_rl.cluster.placement import reserve
from mcore_rl.cluster.session import open_ray_session
from mcore_rl.config import AlgorithmConfig, ClusterConfig, RewardConfig, RolloutConfig
from mcore_rl.planning.bundles import plan_ranks
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.rewards.scorer import Scorer
from mcore_rl.rollout.client import RolloutClient
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.engine_spec import EngineAddress
from mcore_rl.rollout.request import RoutedExpertsShape, Sampling
from mcore_rl.rollout.transport import HttpOptions
from mcore_rl.types import Prompt, StoredBatch, StoredSample, WeightVersion
from mcore_rl.types.scores import Scores
from peak_memory import PeakMemory
from wire_answers import answer_bytes, answering, last_answer_s

ROOT = Path(__file__).resolve().parent.parent
PROMPT_LEN = 128
DEADLINE_S = 1800.0
IDLE_S = 4.0
"""For how long the work of Ray's own threads is measured, which is not that of the samples."""


@dataclass(frozen=True)
class Place:
    """A sink's coordinate; the fields that RankGroup.dispatch reads."""

    dp: int
    owns_output: bool


@dataclass(frozen=True)
class Taken:
    """A step's end: when the first rank had its micro-batches, and what the controller carried.

    messages   whose pickled size counts, besides num_bytes
    """

    ready_s: float
    messages: Sequence[Any]
    num_bytes: int = 0

    def carried_bytes(self) -> int:
        return self.num_bytes + sum(len(pickle.dumps(m)) for m in self.messages)


class Sink:
    """A rank that only takes its micro-batches: all layers' experts, or those of its stage."""

    def __init__(self, rank: int, pp: int, layers: int) -> None:
        self._rank = rank
        self._pp = pp
        share = layers // pp
        stage = rank % pp
        self._layers = tuple(range(stage * share, (stage + 1) * share))
        self._stores: Any = None

    def coordinate(self) -> Place:
        return Place(self._rank // self._pp, self._rank % self._pp == 0)

    def connect_stores(self, stores: Any) -> None:
        self._stores = stores

    def take(self, microbatches: Any) -> tuple[float, int]:
        """Return (the time at which all micro-batches are here, their tokens)."""
        if self._stores is not None:
            microbatches = self._stores.assemble_parts(microbatches, self._layers)
        return time.time(), sum(len(batch.token_ids_T) for batch in microbatches)


def decode(token_ids: Sequence[int]) -> str:
    """Return a text as long as a tokenizer's would be."""
    return "".join(map(chr, token_ids))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", choices=["stores", "here"], default="stores")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    args = parser.parse_args()
    logs = Path(tempfile.mkdtemp(prefix="data_path_"))
    cluster = ClusterConfig(object_store_mib=4096)
    num_ranks = args.dp * args.pp
    with (
        answering(args.engines, args.layers) as engines,
        open_ray_session(cluster, num_cpus=num_ranks + 1),
    ):
        bundles = [plan_ranks(num_ranks, 0.5, gpus_per_node=0), plan_ranks(1, 0.5, gpus_per_node=0)]
        slots, engine_slots = reserve(bundles, timeout_s=60)
        sinks = RankGroup("sink", slots, logs)
        sinks.build(
            Sink, [(rank, args.pp, args.layers) for rank in range(num_ranks)], deadline_s=120
        )
        sinks.find_coordinates(60)
        loop = EventLoop()
        path = by_stores if args.path == "stores" else by_controller
        step = path(args, engines, sinks, loop, engine_slots, logs)
        result = measured(args, engines, step)
        loop.close()
    print(json.dumps(result))


def measured(
    args: argparse.Namespace, engines: Sequence[EngineAddress], step: Callable[..., Taken]
) -> dict[str, Any]:
    """Run a small step that warms everything up, then the step that is measured."""
    step(2, 2, 16)
    num_samples = args.prompts * args.samples
    before_bytes = psutil.Process().memory_info().rss
    peak = PeakMemory()
    with peak:
        idle_s = time.process_time()
        time.sleep(IDLE_S)
        idle_share = (time.process_time() - idle_s) / IDLE_S
    cpu_s = time.process_time()
    began_s = time.monotonic()
    with peak:
        taken = step(args.prompts, args.samples, args.tokens)
    cpu_s = time.process_time() - cpu_s
    step_s = time.monotonic() - began_s
    last_s = max(last_answer_s(engine) for engine in engines)
    return {
        "path": args.path,
        "samples": num_samples,
        "tokens_per_sample": args.tokens,
        "layers": args.layers,
        "step_s": round(step_s, 2),
        "controller_us_per_sample": round(1e6 * (cpu_s - idle_share * step_s) / num_samples, 1),
        "with_idle_us_per_sample": round(1e6 * cpu_s / num_samples, 1),
        "controller_bytes_per_sample": round(taken.carried_bytes() / num_samples),
        "controller_mib_before": before_bytes >> 20,
        "controller_mib_grown": (peak.most_bytes - before_bytes) >> 20,
        "last_token_to_microbatch_s": round(taken.ready_s - last_s, 3),
        "cpus": os.cpu_count(),
        "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def make_prompts(number: int) -> list[Prompt]:
    ids = tuple(3 + i % 90 for i in range(PROMPT_LEN))
    return [Prompt(i, ids, (), "generated", "0") for i in range(number)]


def reward_config() -> RewardConfig:
    return RewardConfig(path=str(ROOT / "recipes" / "rewards" / "arithmetic.py"))


def options(args: argparse.Namespace) -> tuple[RolloutConfig, RoutedExpertsShape | None]:
    shape = RoutedExpertsShape((True,) * args.layers, 8, 128) if args.layers else None
    return RolloutConfig(max_concurrency=8, request_timeout_s=DEADLINE_S), shape


def weighted_batch(
    advantages: Advantages, scores: Scores, samples: Sequence[StoredSample], num_tokens: int
) -> StoredBatch:
    """Return the batch of samples with advantages and loss weights."""
    batch = make_stored_batch(samples, WeightVersion(0))
    advantages_N = advantages.compute_from_samples(scores, samples).numpy()
    return with_stored_weights(replace(batch, advantages_N=advantages_N), "token_mean", num_tokens)


def by_controller(
    args: argparse.Namespace,
    engines: Sequence[EngineAddress],
    sinks: RankGroup,
    loop: EventLoop,
    engine_slots: Any,
    logs: Path,
) -> Callable[..., Taken]:
    """Return a step in which every answer is parsed, scored, packed and sent on by this process."""
    rollout, shape = options(args)
    client = RolloutClient(engines, rollout, HttpOptions.make(rollout, [1], decode, shape).open)
    scorer = Scorer(reward_config(), args.tokens)
    advantages = Advantages(AlgorithmConfig())
    stores = LocalStores()

    def step(num_prompts: int, num_samples: int, num_tokens: int) -> Taken:
        received = num_prompts * num_samples * answer_bytes(engines[0], PROMPT_LEN, num_tokens)
        sampling = Sampling(num_tokens, routed_experts=shape is not None)
        samples = loop.run(client.generate(make_prompts(num_prompts), num_samples, sampling))
        scores = scorer(samples)
        rows = stores.keep(samples)
        batch = weighted_batch(advantages, scores, rows, num_tokens)
        plan = plan_microbatches(batch.lens_N, args.dp, 2 * (PROMPT_LEN + num_tokens))
        per_dp = [stores.assemble_parts(in_parts(batch, parts)) for parts in plan]
        answers = sinks.dispatch("take", per_dp, deadline_s=DEADLINE_S)
        return Taken(min(ready_s for ready_s, _ in answers), per_dp, received)

    return step


def by_stores(
    args: argparse.Namespace,
    engines: Sequence[EngineAddress],
    sinks: RankGroup,
    loop: EventLoop,
    engine_slots: Any,
    logs: Path,
) -> Callable[..., Taken]:
    """Return a step in which this process sees a row per sample."""
    from mcore_rl.cluster.collectors import CollectorGroup, CollectorLimits
    from mcore_rl.rollout.collector_pool import CollectorPool
    from mcore_rl.workers.collector_worker import CollectorSpec

    rollout, shape = options(args)
    limits = CollectorLimits(DEADLINE_S, DEADLINE_S, DEADLINE_S, DEADLINE_S)
    collectors = CollectorGroup([engine_slots] * len(engines), logs, limits)
    scorer = partial(Scorer, reward_config(), args.tokens)
    collectors.start_build(CollectorSpec(rollout, (1,), decode, shape, scorer))
    collectors.connect(engines, {})
    sinks.call_all("connect_stores", collectors.stores, deadline_s=60)
    counted = [CountedCalls(calls) for calls in collectors.list_calls()]
    pool = CollectorPool(
        counted,
        collectors.engines_of,
        EngineHealth([engine.url for engine in engines]),
        rollout.max_concurrency,
    )
    advantages = Advantages(AlgorithmConfig())

    def step(num_prompts: int, num_samples: int, num_tokens: int) -> Taken:
        for calls in counted:
            calls.messages.clear()
        sampling = Sampling(num_tokens, routed_experts=shape is not None)
        samples = loop.run(pool.generate(make_prompts(num_prompts), num_samples, sampling))
        scores = loop.run(collectors.score(samples))
        batch = weighted_batch(advantages, scores, samples, num_tokens)
        plan = plan_microbatches(batch.lens_N, args.dp, 2 * (PROMPT_LEN + num_tokens))
        per_dp = [in_parts(batch, parts) for parts in plan]
        answers = sinks.dispatch("take", per_dp, deadline_s=DEADLINE_S)
        messages = [message for calls in counted for message in calls.messages]
        return Taken(min(ready_s for ready_s, _ in answers), [*messages, scores, *per_dp])

    return step


class CountedCalls:
    """A collector whose messages are kept, to count their bytes after the step."""

    def __init__(self, calls: Any) -> None:
        self._calls = calls
        self.messages: list[Any] = []

    async def submit(self, commands: Any) -> None:
        self.messages.append(commands)
        await self._calls.submit(commands)

    async def poll_events(self, wait_s: float, gather_s: float) -> Any:
        events = await self._calls.poll_events(wait_s, gather_s)
        self.messages.append(events)
        return events

    async def idle_seconds(self) -> float:
        return await self._calls.idle_seconds()

    async def hold(self, session: int, cut_off: bool) -> int:
        return await self._calls.hold(session, cut_off)

    async def resume(self, session: int) -> None:
        await self._calls.resume(session)

    async def restart(self, first_group: int) -> bool:
        return await self._calls.restart(first_group)


if __name__ == "__main__":
    main()

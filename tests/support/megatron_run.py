"""The loop of a run over Megatron ranks and SGLang engines in plain processes, without Ray."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from mcore_rl.algo.estimator import Advantages
from mcore_rl.batches.local_stores import LocalStores
from mcore_rl.cluster.adapter_slots import make_adapter_slots
from mcore_rl.cluster.engine_specs import find_experts_shape, make_engine_spec
from mcore_rl.config import (
    CheckpointConfig,
    Config,
    DriftConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from mcore_rl.data.source import ShuffledStream
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.loops.rl import train
from mcore_rl.loops.roles import Roles
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.rollout.client import RolloutClient
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.transport import HttpOptions
from mcore_rl.run.links import make_record
from mcore_rl.run.roles.advantages import StoredAdvantages
from mcore_rl.run.roles.colocation import EngineMemory, SharedGpus
from mcore_rl.run.roles.generator import EngineGenerator
from mcore_rl.run.roles.local_trainer import LocalTrainer
from mcore_rl.run.roles.parity_check import ParityCheck, make_probe
from mcore_rl.run.roles.parity_tolerance import ParityTolerance
from mcore_rl.run.roles.trainer import PackedTokenTrainer, Packing
from mcore_rl.run.roles.weight_sync import EngineSync
from mcore_rl.tools.doctor.step_checks import count_even_tokens
from mcore_rl.types import Prompt, StoredSample, WeightVersion
from mcore_rl.types.scores import Scores
from mcore_rl.weight_sync.controller.factor_sync import choose_factors
from mcore_rl.weight_sync.controller.sync import SyncController
from mcore_rl.weights.hf.config import ModelFacts, moe_layers, read_hf_config
from mcore_rl.weights.layouts.sglang_models import EXPERT_BIASES
from mcore_rl.weights.models import family_of
from tests.support.engine_keys import KEYS
from tests.support.megatron_ranks import MegatronRanks
from tests.support.storing_client import StoringClient
from tests.support.tiny_models import VOCAB

SAMPLED = RolloutConfig(
    prompts_per_step=8,
    samples_per_prompt=4,
    max_response_len=12,
    max_concurrency=16,
    kv_cache_len=2048,
    deterministic=True,
)
TIMEOUT_S = 60.0


def make_config(
    hf_dir: Path, layout: Mapping[str, Any], steps: int = 1, *, routed_experts: bool = True
) -> Config:
    """A GRPO recipe; the router's expert bias and indexers are trained if the family has them.

    `routed_experts`: train on the experts that the engines chose.
    """
    hf_config = read_hf_config(hf_dir)
    names = family_of(hf_config).shapes(hf_config)
    has_bias = any(name.endswith(EXPERT_BIASES) for name in names)
    return Config(
        run=RunConfig(steps=steps, call_timeout_s=TIMEOUT_S),
        model=ModelConfig(path=str(hf_dir)),
        parallel=ParallelConfig(**layout),
        train=TrainConfig(
            optimizer=OptimizerConfig(lr=1e-3),
            max_tokens_per_microbatch=256,
            router_replay="engine" if routed_experts and any(moe_layers(hf_config)) else "none",
            router_bias_rate=0.01 if has_bias else 0.0,
            indexer_loss=1.0 if "index_topk" in hf_config else 0.0,
        ),
        rollout=SAMPLED,
        drift=DriftConfig(routed_experts=routed_experts),
        checkpoint=CheckpointConfig(asynchronous=False),
    )


def start_engines(
    config: Config, folder: Path, sizes: Sequence[Mapping[str, Any]]
) -> list[EngineProcess]:
    """Start an engine for each of `sizes`, which are options of RolloutConfig."""
    policy = ModelFacts.read(config.model.path)
    seed = config.run.seed
    engines = []
    for i, own in enumerate(sizes):
        rollout = replace(config.rollout, **own)
        log = folder / f"engine{i}.log"
        adapters = make_adapter_slots(config.train.lora, policy, has_trainer=True)
        groups = config.model, rollout, config.drift, policy
        spec = make_engine_spec(*groups, log, KEYS, seed=seed, adapters=adapters)
        engines.append(EngineProcess(spec))
    for engine in engines:
        engine.start()
    return engines


def make_prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for index in range(SAMPLED.prompts_per_step):
        num_tokens = int(torch.randint(6, 15, (), generator=generator))
        ids = torch.randint(0, VOCAB, (num_tokens,), generator=generator).tolist()
        prompts.append(Prompt(index, tuple(ids), (), "random", None))
    return prompts


@dataclass
class Memory:
    """A log that keeps one step in memory."""

    metrics: dict[str, float] = field(default_factory=dict)
    samples: Sequence[StoredSample] = ()
    scores: Scores = field(default_factory=lambda: Scores([]))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics |= metrics

    def log_samples(
        self, step: int, samples: Sequence[StoredSample], scores: Scores, split: str = "train"
    ) -> None:
        if split == "train":
            self.samples, self.scores = samples, scores


class MegatronRun:
    """Trains the actors that `ranks` have built of `config` on samples of `engines`."""

    def __init__(
        self,
        config: Config,
        ranks: MegatronRanks,
        engines: Sequence[EngineProcess],
        folder: Path,
        *,
        loaded: bool = False,
    ) -> None:
        """`loaded`: the engines serve the checkpoint that the ranks were built of."""
        self.config = config
        self._policy = ModelFacts.read(config.model.path)
        self._ranks = ranks
        self._engines = engines
        self.folder = RunFolder(folder)
        self.log = Memory()
        self._loop = EventLoop()
        self.health = EngineHealth([engine.url for engine in engines])
        self.sync_controller = SyncController(
            ranks,
            bucket_mib=0.0625,
            timeout_s=TIMEOUT_S,
            record=make_record(config.model, config.parallel, config.rollout, self._policy),
            keys=KEYS,
            verify_every=1,
            loaded=loaded,
            factors=choose_factors(
                config.train.lora, config.model, config.rollout, self._policy, seed=0
            ),
        )
        self.stores = LocalStores()
        self.trainer = PackedTokenTrainer(
            ranks,
            self.folder,
            packing=Packing.from_config(config.parallel, config.train),
            temperature=config.rollout.temperature,
            checkpoint=config.checkpoint,
        )

    def train(self, start_step: int) -> None:
        """Sync, then run the steps after `start_step`; the last one saves a checkpoint."""
        watched = self._loop.run
        health = self.health
        gpus = SharedGpus(EngineMemory([], TIMEOUT_S), watched)
        parity_check = ParityCheck(
            self.trainer,
            self.config.parity_check,
            ParityTolerance(self.config.parity_check, self.config.model.dtype),
            TIMEOUT_S,
            gpus.for_rollout,
            KEYS,
            self.stores.assemble,
        )
        weights = EngineSync(
            *(self.sync_controller, parity_check, health, self._look, watched, gpus),
            count_steps=lambda: self.trainer.num_steps,
        )
        probe = make_probe(make_prompts(), self.config.parity_check.sequences)
        weights.sync_first(WeightVersion(start_step), probe)
        roles = Roles(
            prompts=ShuffledStream(make_prompts(), self.config.run.seed),
            held_out=[],
            generator=EngineGenerator(
                StoringClient(self._make_client(), self.stores), self.config.rollout, watched
            ),
            reward=lambda samples: count_even_tokens(self.stores.samples(samples)),
            advantages=StoredAdvantages(
                Advantages(self.config.algorithm), self.stores.apply, has_teacher=False
            ),
            trainer=LocalTrainer(self.trainer, self.stores),
            weights=weights,
            log=self.log,
            on_tokens=self.stores.apply,
        )
        train(self.config, roles, start_step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.close()

    def _make_client(self) -> RolloutClient:
        return RolloutClient(
            [engine.address for engine in self._engines],
            self.config.rollout,
            HttpOptions.make(
                self.config.rollout, [], str, find_experts_shape(self.config.drift, self._policy)
            ).open,
            self.health,
        )

    async def _look(self) -> None:
        for engine in self._engines:
            assert engine.is_alive(), f"{engine.name} died:\n{engine.tail()}"

"""Makes the controller that links engines to trainer ranks, from a recipe."""

from collections.abc import Sequence
from functools import partial

from mcore_rl.config import ModelConfig, ParallelConfig, RolloutConfig, SyncConfig
from mcore_rl.planning.deployment import choose_served, record_layouts
from mcore_rl.process.server_keys import ServerKeys
from mcore_rl.weight_sync.controller.factor_sync import FactorOptions
from mcore_rl.weight_sync.controller.strategy import TrainerRanks
from mcore_rl.weight_sync.controller.sync import RecordLayouts, SyncController
from mcore_rl.weights.hf.config import ModelFacts


def make_links(
    model: ModelConfig,
    parallel: ParallelConfig,
    rollout: RolloutConfig,
    sync: SyncConfig,
    policy: ModelFacts,
    trainer: TrainerRanks,
    *,
    keys: ServerKeys | None,
    host: str,
    timeout_s: float,
    start_step: int,
    is_colocated: bool,
    is_rounded: bool,
    factors: Sequence[FactorOptions],
) -> SyncController:
    """Return the controller that links engines to trainer ranks.

    host           this process's address
    is_colocated   engines are on the trainer ranks' GPUs
    is_rounded     trainer ranks send other weights than the files' (train.fake_quantization)
    factors        as choose_factors returned it
    """
    # Engines of quantized, packed or random models load nothing; colocated ones lost it by then.
    is_plain = rollout.quantization == "none" and not policy.is_packed
    is_loaded = model.init == "hf" and is_plain and not is_rounded
    is_kept = start_step == 0 and not is_colocated
    return SyncController(
        trainer,
        keys=keys,
        host=host,
        bucket_mib=sync.bucket_mib,
        timeout_s=timeout_s,
        staged=rollout.stage_weights,
        relay=sync.relay,
        delta=sync.delta,
        pull=sync.pull,
        record=make_record(model, parallel, rollout, policy),
        trace_all=sync.trace == "full",
        verify_every=sync.reads_back_every,
        loaded=is_loaded and is_kept and sync.verify == "destination",
        factors=factors,
    )


def make_record(
    model: ModelConfig, parallel: ParallelConfig, rollout: RolloutConfig, policy: ModelFacts
) -> RecordLayouts:
    """Return the function that records the layouts of trainer ranks, and of engines by size."""
    policy = choose_served(policy, rollout)
    return partial(record_layouts, policy, model.dtype, parallel, quantization=rollout.quantization)

"""Makes the parity check of a run, which compares engines with the trainer after each sync."""

from collections.abc import Callable, Sequence

from mcore_rl.config import Config
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.process.server_keys import ServerKeys
from mcore_rl.process.versions import find_versions
from mcore_rl.run.images import image_marks
from mcore_rl.run.roles.parity_check import ParityCheck, ProbeScorer
from mcore_rl.run.roles.parity_tolerance import ParityTolerance
from mcore_rl.run.startup import Started
from mcore_rl.types import StoredBatch, TrainBatch
from mcore_rl.weights.hf.config import ModelFacts

_COMPUTING = ("torch", "sglang", "megatron-core", "transformer-engine")


def make_parity_check(
    config: Config,
    policy: ModelFacts,
    started: Started,
    scorer: ProbeScorer,
    keys: ServerKeys,
    fetch: Callable[[StoredBatch], TrainBatch],
    folder: RunFolder,
) -> ParityCheck:
    """Return the parity check; `fetch` brings the tokens of its sequences."""
    return ParityCheck(
        scorer,
        config.parity_check,
        make_parity_tolerance(config, folder, started.trainer.device_names()),
        config.run.call_timeout_s,
        started.gpus.for_rollout,
        keys,
        fetch,
        image_marks(policy),
    )


def make_parity_tolerance(
    config: Config, folder: RunFolder, devices: Sequence[str]
) -> ParityTolerance:
    """Return the tolerance of the parity check; a run that continues reads what it had learned.

    devices   names of the trainer ranks' GPUs; other GPUs round otherwise
    """
    rollout = config.rollout
    made_by = {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "quantization": rollout.quantization,
        "engine_ranks": rollout.engine_ranks,
        "compiled": rollout.compiled,
        "sglang": {name: str(value) for name, value in sorted(rollout.sglang.items())},
        "megatron": {name: str(value) for name, value in sorted(config.train.megatron.items())},
        "versions": find_versions(_COMPUTING),
        "devices": list(devices),
    }
    return ParityTolerance(
        config.parity_check, config.engine_precision, folder.parity_check, made_by
    )

"""Checks of options of different groups against one another; errors name both and a remedy."""

from collections.abc import Mapping

from mcore_rl.config.agents import AgentsConfig
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.rollout import DriftConfig, RolloutConfig
from mcore_rl.config.run import RewardConfig
from mcore_rl.config.served_models import ServedModelConfig
from mcore_rl.config.training import CriticConfig, ModelConfig, ParallelConfig, TrainConfig


def check_quantization(rollout: RolloutConfig, model: ModelConfig) -> None:
    if rollout.quantization == "fp8" and model.dtype != "bfloat16":
        raise ValueError(
            f"rollout.quantization=fp8 with model.dtype={model.dtype}: needs model.dtype=bfloat16"
        )


def check_agents(agents: AgentsConfig, rollout: RolloutConfig) -> None:
    """Raise ValueError if episodes cannot run as the recipe says."""
    if agents.max_turn_len > rollout.max_response_len:
        raise ValueError(
            f"agents.max_turn_len={agents.max_turn_len} exceeds rollout.max_response_len="
            f"{rollout.max_response_len}, which bounds all turns together: raise the latter"
        )


def check_steps(
    algorithm: AlgorithmConfig, rollout: RolloutConfig, train: TrainConfig, critic: CriticConfig
) -> None:
    """Raise ValueError if the samples of a step cannot be trained on as the recipe says."""
    if rollout.stale == "correct" and not algorithm.correction.is_on:
        raise ValueError(
            "rollout.stale=correct with algorithm.correction.weight=none and bypass=false: none"
            " corrects; set algorithm.correction.weight=token, or rollout.stale=wait"
        )
    if rollout.mode != "sync" and not algorithm.correction.is_chosen:
        raise ValueError(
            f"rollout.mode={rollout.mode} without algorithm.correction.weight: older weights draw"
            " the samples, and the ratio of the policy loss does not correct for that, as it"
            " compares with the policy at the start of the training step; with one optimizer step"
            f" (train.mini_batches * train.epochs = {train.mini_batches * train.epochs} here) it is"
            " 1 however stale the samples are. Choose algorithm.correction.weight=token, sequence"
            " or geometric, algorithm.correction.bypass=true, or weight=none for no correction"
        )
    num_samples = rollout.prompts_per_step * rollout.samples_per_prompt
    for name, mini_batches in (("train", train.mini_batches), ("critic", critic.mini_batches)):
        if num_samples % mini_batches:
            raise ValueError(
                f"rollout.prompts_per_step * rollout.samples_per_prompt = {num_samples} is not"
                f" divisible by {name}.mini_batches={mini_batches}"
            )


def check_overlong(reward: RewardConfig, rollout: RolloutConfig) -> None:
    if reward.overlong_buffer_len > rollout.max_response_len:
        raise ValueError(
            f"reward.overlong_buffer_len={reward.overlong_buffer_len} exceeds"
            f" rollout.max_response_len={rollout.max_response_len}: even an empty response would be"
            " punished for its length; lower the former"
        )


def check_colocated_models(
    served: Mapping[str, ServedModelConfig], parallel: ParallelConfig, rollout: RolloutConfig
) -> None:
    """Raise ValueError if a model cannot be served on the trainer ranks' GPUs."""
    for role, model in served.items():
        needed = model.engines * model.engine_ranks
        if model.is_colocated and needed > parallel.world_size:
            raise ValueError(
                f"{role}.colocated=true with {role}.engines * {role}.tp * {role}.pp = {needed}:"
                f" there are parallel.world_size={parallel.world_size} trainer ranks to share a GPU"
                " with"
            )
        if model.is_colocated and rollout.mode != "sync":
            raise ValueError(
                f"{role}.colocated=true with rollout.mode={rollout.mode}: samples are scored while"
                f" the trainer uses the GPUs; set rollout.mode=sync, or {role}.colocated=false"
            )


def check_replay(train: TrainConfig, drift: DriftConfig) -> None:
    if train.router_replay == "engine" and not drift.routed_experts:
        raise ValueError(
            "train.router_replay=engine with drift.routed_experts=False: engines are not asked for"
            " their experts; set drift.routed_experts=true"
        )


def check_colocated(parallel: ParallelConfig, rollout: RolloutConfig) -> None:
    needed = rollout.engines * rollout.engine_ranks
    if needed > parallel.world_size:
        raise ValueError(
            f"cluster.colocated=true with rollout.engines * rollout.tp * rollout.pp = {needed}:"
            f" there are parallel.world_size={parallel.world_size} trainer ranks to share a GPU"
            " with"
        )
    for name, needs, why in (
        ("mode", "sync", "an engine cannot generate while its GPUs train"),
        ("stage_weights", False, "there is no memory for the weights twice"),
        ("restarts", 0, "a server that starts would take the memory that training uses"),
    ):
        if getattr(rollout, name) != needs:
            raise ValueError(
                f"cluster.colocated=true with rollout.{name}={getattr(rollout, name)}: {why};"
                f" set rollout.{name}={str(needs).lower()}"
            )

"""Refuses options that are set although nothing reads them in their context.

An option counts as set if it differs from its default. Only what is surely unread is listed. What
depends on the chosen advantage or loss is refused by algo/requirements.py.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mcore_rl.config.algorithm import CorrectionConfig, KLConfig
from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.config.run import RewardConfig
from mcore_rl.config.served_models import ServedModelConfig
from mcore_rl.config.training import OptimizerConfig
from mcore_rl.config.tree import defaults_of, shown, value_of

if TYPE_CHECKING:
    from mcore_rl.config import Config


@dataclass(frozen=True)
class Unread:
    """Options (or groups, with all their options) that nothing reads because of `context`."""

    options: tuple[str, ...]
    context: str
    remedy: str


def check_unread(config: "Config") -> None:
    """Raise ValueError naming the first option that is set although nothing reads it."""
    refuse(config, _unread(config))


def refuse(config: "Config", unread_options: Iterable[Unread]) -> None:
    """Raise ValueError naming the first of `unread_options` that differs from its default."""
    for unread in unread_options:
        for option in unread.options:
            for name, default in defaults_of(type(config), option):
                value = value_of(config, name)
                if value != default:
                    raise ValueError(
                        f"{name}={shown(value)} with {unread.context}, which has no use for it:"
                        f" {unread.remedy}, or leave {name} out (by default it is {shown(default)})"
                    )


def _unread(config: "Config") -> Iterator[Unread]:
    yield from _of_rollout(config.rollout)
    yield from _of_kl(config.algorithm.kl)
    yield from _of_correction(config.algorithm.correction)
    yield from _of_reward(config.reward, config.agents.is_used)
    if not config.eval.num_samples:
        options = ("eval.temperature", "eval.top_p")
        yield Unread(options, "eval.samples=0 and eval.pass_k=1", "set eval.samples=4")
    if config.agents.is_used:
        context = f"agents.environment={config.agents.environment}"
        remedy = "rollout.max_response_len bounds episodes of evaluations, too: set it"
        yield Unread(("eval.max_response_len",), context, remedy)
    if not config.agents.is_used:
        yield Unread(("agents",), "agents.environment=''", "set agents.environment")
    if not config.sandbox.is_used:
        yield Unread(("sandbox",), "sandbox.workers=0", "set sandbox.workers above 0")
    if not config.search.is_used:
        yield Unread(("search",), "search.index=''", "set search.index")
    for role, model in config.served_groups.items():
        yield from _of_served(role, model)
    if not config.judge.is_used:
        context = "judge.path='' and judge.url=''"
        yield Unread(("reward.judge",), context, "set judge.path or judge.url")
    if not config.reward_model.is_used:
        context = "reward_model.path='' and reward_model.url=''"
        remedy = "set reward_model.path or reward_model.url"
        yield Unread(("reward.model_tokenizer",), context, remedy)
    for group, optimizer in config.optimizers.items():
        yield from _of_optimizer(group, optimizer)
    if config.cluster.address is not None:
        context = f"cluster.address={config.cluster.address}"
        remedy = "give it to `ray start --object-store-memory`"
        yield Unread(("cluster.object_store_mib",), context, remedy)
        remedy = "give `ray start --head` --include-dashboard=true"
        yield Unread(("cluster.dashboard",), context, remedy)
    else:
        options = ("cluster.num_nodes", "cluster.separate_nodes")
        yield Unread(
            options, "cluster.address=null", "submit the run, or join a Ray by its address"
        )
    if not config.profile.steps:
        options = ("profile.ranks", "profile.tool")
        yield Unread(options, "profile.steps=[]", "set profile.steps=[3]")
    yield from _of_alarms(config)


def _of_alarms(config: "Config") -> Iterator[Unread]:
    if config.canary.sequences == 0:
        options = ("canary.tolerance", "canary.factor")
        yield Unread(options, "canary.sequences=0", "set canary.sequences=2")
    if config.canary.tolerance is not None:
        context = f"canary.tolerance={config.canary.tolerance:g}"
        yield Unread(("canary.factor",), context, "set canary.tolerance=null")
    if config.sync.verify != "destination":
        context = f"sync.verify={config.sync.verify}"
        yield Unread(("sync.verify_every",), context, "set sync.verify=destination")


def _of_rollout(rollout: RolloutConfig) -> Iterator[Unread]:
    mode = f"rollout.mode={rollout.mode}"
    if rollout.mode != "async":
        options = ("rollout.max_staleness", "rollout.stale", "rollout.partial")
        yield Unread(options, mode, "choose another rollout.mode")
    if rollout.mode == "sync":
        yield Unread(("rollout.max_in_flight",), mode, "choose another rollout.mode")
    else:
        yield Unread(("rollout.oversampling",), mode, "choose another rollout.mode")
    if rollout.engines == 1:
        remedy = "set rollout.engines above 1"
        yield Unread(("rollout.migration_gap",), "rollout.engines=1", remedy)
    if not rollout.store_gib:
        remedy = "set rollout.store_gib above 0"
        yield Unread(("rollout.spill_dir",), "rollout.store_gib=0", remedy)
    if not rollout.dynamic_sampling:
        options = ("rollout.oversampling", "rollout.max_rounds")
        remedy = "set rollout.dynamic_sampling=true"
        yield Unread(options, "rollout.dynamic_sampling=false", remedy)


def _of_kl(kl: KLConfig) -> Iterator[Unread]:
    remedy = "set algorithm.kl.coef above 0"
    if kl.coef == 0:
        options = ("algorithm.kl.in_reward", "algorithm.kl.horizon")
        yield Unread(options, "algorithm.kl.coef=0", remedy)
    if kl.target == 0:
        remedy = "set algorithm.kl.target above 0"
        yield Unread(("algorithm.kl.horizon",), "algorithm.kl.target=0", remedy)


def _of_correction(correction: CorrectionConfig) -> Iterator[Unread]:
    if not correction.is_weighted:
        names = ("low", "high", "bound", "normalize")
        options = tuple(f"algorithm.correction.{name}" for name in names)
        context = f"algorithm.correction.weight={shown(correction.weight)}"
        yield Unread(options, context, "set algorithm.correction.weight=token")
    if correction.bound == "truncate":
        remedy = "set algorithm.correction.bound=mask"
        yield Unread(("algorithm.correction.low",), "algorithm.correction.bound=truncate", remedy)
    if correction.reject == "none":
        remedy = "set algorithm.correction.reject=token or sequence"
        names = ("reject_above", "reject_below", "reject_estimator")
        options = tuple(f"algorithm.correction.{name}" for name in names)
        yield Unread(options, "algorithm.correction.reject=none", remedy)
    elif correction.reject_estimator != "k1":
        context = f"algorithm.correction.reject_estimator={correction.reject_estimator}"
        remedy = "set algorithm.correction.reject_estimator=k1"
        yield Unread(("algorithm.correction.reject_below",), context, remedy)


def _of_reward(reward: RewardConfig, has_environment: bool) -> Iterator[Unread]:
    if reward.overlong_buffer_len == 0:
        remedy = "set reward.overlong_buffer_len"
        yield Unread(("reward.overlong_penalty",), "reward.overlong_buffer_len=0", remedy)
    if reward.on_error != "value":
        context = f"reward.on_error={reward.on_error}"
        yield Unread(("reward.error_value",), context, "set reward.on_error=value")
    if reward.on_error == "stop" and not has_environment:
        remedy = "set reward.on_error=leave_out"
        yield Unread(("reward.max_failed_share",), "reward.on_error=stop", remedy)
    if not reward.path:
        options = ("reward.name", "reward.kwargs")
        yield Unread(options, "reward.path=''", "set reward.path")


def _of_served(role: str, model: ServedModelConfig) -> Iterator[Unread]:
    if not model.is_used:
        context = f"{role}.path='' and {role}.url=''"
        yield Unread((role,), context, f"set {role}.path or {role}.url")
    elif model.url:
        names = (
            *("engines", "tp", "ep", "pp", "dtype", "kv_cache_len"),
            *("startup_timeout_s", "restarts", "sglang"),
        )
        options = tuple(f"{role}.{name}" for name in names)
        yield Unread(options, f"{role}.url={model.url}", f"set {role}.path instead")


def _of_optimizer(group: str, optimizer: OptimizerConfig) -> Iterator[Unread]:
    if optimizer.schedule == "constant":
        remedy = f"set {group}.schedule=linear or cosine"
        yield Unread((f"{group}.min_lr",), f"{group}.schedule=constant", remedy)

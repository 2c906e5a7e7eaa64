"""Converts advantages, losses, KL and the critic of NeMo-RL 0.7 into options of a recipe."""

from typing import Any

from mcore_rl.tools.translate.nemo_policy import COLOCATED, is_ppo, loop_of
from mcore_rl.tools.translate.translation import (
    Decision,
    ForeignOptions,
    Found,
    RecipeLine,
    list_differing,
    translate_renamed,
)

OWN_ADVANTAGE = "register an advantage of your own (docs/algorithms.md)"
OWN_REWARD = "a reward of your own, reward.path, may return other numbers (docs/rewards.md)"
DISTILLATION = "set algorithm.advantage=distillation, algorithm.loss=policy_gradient and"
DISTILLATION += " teacher.path (docs/algorithms.md)"
LOSS = "loss_fn"
NAMES = ("gdpo", "gae")
WITHOUT_COUNTERPART: dict[str, tuple[Any, str]] = {
    f"{LOSS}.kl_input_clamp_value": (20.0, "the KL's estimate is not clamped"),
    f"{LOSS}.kl_output_clamp_value": (10.0, "the KL's estimate is not clamped"),
    f"{LOSS}.use_on_policy_kl_approximation": (
        False,
        "algorithm.kl.estimator=k3+ has the gradient of the KL itself",
    ),
    f"{LOSS}.positive_example_nll_weight": (0.0, "register a loss of your own"),
    "on_policy_distillation": (None, DISTILLATION),
}
OF_LOOP: dict[str, tuple[Any, str]] = {
    "advantage_clip_low": (None, OWN_ADVANTAGE),
    "advantage_clip_high": (None, OWN_ADVANTAGE),
    "invalid_tool_call_advantage": (None, OWN_ADVANTAGE),
    "malformed_thinking_advantage": (None, OWN_ADVANTAGE),
    "seq_logprob_error_threshold": (
        None,
        "algorithm.correction.reject=sequence leaves out sequences above a KL, in nats",
    ),
    "reward_scaling.enabled": (False, OWN_REWARD),
    "reward_shaping.stop_properly_penalty_coef": (None, OWN_REWARD),
    "adv_estimator.gae_lambda_policy": (None, "algorithm.gae_lambda is a number"),
    "adv_estimator.length_adaptive_alpha": (0.0, "algorithm.gae_lambda is a number"),
}


def translate_advantage(options: ForeignOptions) -> Found:
    loop = loop_of(options)
    group = f"{loop}.adv_estimator"
    name = options.take(f"{group}.name", "gae" if is_ppo(options) else "grpo")
    source = f"{group}.name"
    if name == "grpo":
        yield from _grpo(options, loop)
    elif name == "reinforce_plus_plus":
        baseline = f"{group}.minus_baseline"
        ours = f"{name}_baseline" if options.take(baseline, True) else name
        yield RecipeLine("algorithm.advantage", ours, (source, baseline))
    elif name in NAMES:
        yield RecipeLine("algorithm.advantage", name, (source,))
    else:
        yield Decision(source, name, DISTILLATION if name == "opd" else OWN_ADVANTAGE)
    if options.take(f"{loop}.overlong_filtering", False):
        yield RecipeLine("algorithm.filter_overlong", True, (f"{loop}.overlong_filtering",))
    yield from list_differing(options, {f"{loop}.{key}": value for key, value in OF_LOOP.items()})


def _grpo(options: ForeignOptions, loop: str) -> Found:
    """Yield GRPO's advantage, whose two switches make others of it."""
    switches = {}
    sources = [f"{loop}.adv_estimator.name"]
    for name in ("normalize_rewards", "use_leave_one_out_baseline"):
        outer = options.take(f"{loop}.{name}", True)
        switches[name] = options.take(f"{loop}.adv_estimator.{name}", outer)
        sources += [f"{loop}.adv_estimator.{name}", f"{loop}.{name}"]
    scaled = switches["normalize_rewards"]
    others = switches["use_leave_one_out_baseline"]
    plain = "rloo" if others else "dr_grpo"
    yield RecipeLine("algorithm.advantage", "grpo" if scaled else plain, tuple(sources))
    if scaled and others:
        advice = "there mean and deviation are those of a group's other rewards, here of all"
        yield Decision(f"{loop}.use_leave_one_out_baseline", True, advice)


def translate_loss(options: ForeignOptions) -> Found:
    kinds = {
        "cispo": f"{LOSS}.use_cispo",
        "policy_gradient": f"{LOSS}.disable_ppo_ratio",
        "gspo": f"{LOSS}.sequence_level_importance_ratios",
    }
    chosen = [kind for kind, source in kinds.items() if options.take(source, False)]
    loss = chosen[0] if chosen else "ppo_clip"
    yield RecipeLine("algorithm.loss", loss, tuple(kinds[kind] for kind in chosen))
    by_token = options.take(f"{LOSS}.token_level_loss", True)
    mean = "token_mean" if by_token else "sequence_mean"
    yield RecipeLine("algorithm.aggregation", mean, (f"{LOSS}.token_level_loss",))
    table: dict[str, tuple[str, Any]] = {
        f"{LOSS}.ratio_clip_min": ("algorithm.clip_low", 0.2),
        f"{LOSS}.ratio_clip_max": ("algorithm.clip_high", 0.2),
        f"{LOSS}.ratio_clip_c": ("algorithm.dual_clip", None),
    }
    yield from translate_renamed(options, table)
    yield from _kl(options)
    yield from _correction(options)
    yield from list_differing(options, WITHOUT_COUNTERPART)


def _kl(options: ForeignOptions) -> Found:
    names = ("reference_policy_kl_penalty", "reference_policy_kl_type", "use_kl_in_reward")
    coef, kind, in_reward = (f"{LOSS}.{name}" for name in names)
    yield RecipeLine("algorithm.kl.coef", options.take(coef, 0.01), (coef,))
    estimator = options.take(kind, "k3")
    if estimator in ("k1", "k2", "k3"):
        yield RecipeLine("algorithm.kl.estimator", estimator, (kind,))
    else:
        yield Decision(kind, estimator, "algorithm.kl.estimator has k1, k2, k3 and abs")
    if options.take(in_reward, False):
        yield RecipeLine("algorithm.kl.in_reward", True, (in_reward,))


def _correction(options: ForeignOptions) -> Found:
    switch = f"{LOSS}.use_importance_sampling_correction"
    kind_name = f"{LOSS}.truncated_importance_sampling_type"
    high_name = f"{LOSS}.truncated_importance_sampling_ratio"
    low_name = f"{LOSS}.truncated_importance_sampling_ratio_min"
    if not options.take(switch, False):
        return
    by_sequence = options.take(f"{LOSS}.sequence_level_importance_ratios", False)
    weight = "sequence" if by_sequence else "token"
    yield RecipeLine("algorithm.correction.weight", weight, (switch,))
    kind = options.take(kind_name, None)
    high = options.take(high_name, None)
    low = options.take(low_name, None)
    if high is None:
        advice = "there weights have no bound, here algorithm.correction.high is one"
        yield Decision(high_name, None, advice)
    else:
        yield RecipeLine("algorithm.correction.high", high, (high_name,))
    if kind == "icepop":
        yield RecipeLine("algorithm.correction.bound", "mask", (kind_name,))
        yield RecipeLine("algorithm.correction.low", low or 0.0, (low_name,))
    elif low:
        advice = "algorithm.correction.low is read with algorithm.correction.bound=mask only"
        yield Decision(low_name, low, advice)
    if kind not in (None, "tis", "icepop"):
        advice = "algorithm.correction.reject=sequence leaves out sequences above a KL, in nats"
        yield Decision(kind_name, kind, advice)


def translate_critic(options: ForeignOptions) -> Found:
    """Yield what only PPO's critic has."""
    group = "ppo.adv_estimator"
    lam = options.take(f"{group}.gae_lambda", 0.95)
    own = options.take(f"{group}.gae_lambda_value", lam)
    yield RecipeLine("algorithm.gae_lambda", lam, (f"{group}.gae_lambda",))
    sources = (f"{group}.gae_lambda_value", f"{group}.gae_lambda")
    yield RecipeLine("critic.gae_lambda", own, sources)
    path = options.take("value.model_name", None)
    if path is not None and path != options.take("policy.model_name", None):
        yield RecipeLine("critic.path", path, ("value.model_name",))
    table = {
        f"{group}.gae_gamma": ("algorithm.gamma", 1.0),
        "value_loss_fn.cliprange": ("critic.value_clip", 0.2),
        "ppo.policy_training_start_step": ("critic.warmup_steps", 0),
    }
    yield from translate_renamed(options, table)
    advice = "the value loss is not scaled: critic.optimizer.clip_grad alone reads its size"
    scale = options.take("value_loss_fn.scale", 1.0)
    if scale != 1:
        yield Decision("value_loss_fn.scale", scale, advice)
    normalized = f"{group}.normalize_advantages"
    yield from list_differing(
        options, {normalized: (True, "advantages of gae are always normalized")}
    )
    if options.take(f"{COLOCATED}.enabled", True):
        yield RecipeLine("critic.colocated", True, (f"{COLOCATED}.enabled",))
    advice = (
        "set critic.lora.rank, alpha and targets by names of HuggingFace modules (docs/lora.md)"
    )
    adapters = {
        "value.dtensor_cfg.lora_cfg.enabled": (False, advice),
        "value.megatron_cfg.peft.enabled": (False, advice),
    }
    yield from list_differing(options, adapters)

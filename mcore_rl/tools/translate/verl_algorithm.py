"""Converts advantages, losses, KL and the critic of verl 0.9 into options of a recipe."""

import math

from mcore_rl.tools.translate.translation import (
    Decision,
    ForeignOptions,
    Found,
    RecipeLine,
    translate_renamed,
)
from mcore_rl.tools.translate.verl_shared import (
    ACTOR,
    is_fully_async,
    is_megatron,
    is_one_step_off,
    take_prompts,
    take_shared,
)
from mcore_rl.tools.translate.verl_training import (
    layout_of,
    layout_of_fsdp,
    passes,
    translate_factors,
    translate_optimizer,
)

ADVANTAGES = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "gdpo": "gdpo",
    "grpo_passk": "grpo_pass_k",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "remax": "remax",
    "gpg": "gpg",
    **{name: name for name in ("optimal_token_baseline", "tir_optimal_token_baseline")},
}
LOSSES = {
    "vanilla": "ppo_clip",
    "geo_mean": "gmpo",
    "gpg": "policy_gradient",
    **{name: name for name in ("gspo", "sapo", "cispo", "dro", "clip_cov", "kl_cov")},
    **{name: name for name in ("dppo_tv", "dppo_kl")},
}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "constant",
    "seq-mean-token-sum": "constant",
}
ESTIMATORS = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
    "abs": "abs",
}
CORRECTION = "algorithm.rollout_correction"
REJECTIONS = {
    "token": "token",
    "seq_mean": "sequence",
    "seq_sum": "sequence_sum",
    "seq_max": "sequence_max",
}


def translate_advantage(options: ForeignOptions) -> Found:
    name = take_shared(options, "algorithm.adv_estimator")
    ours = ADVANTAGES.get(name)
    if find_teacher(options) is not None:
        ours = "distillation"
        yield RecipeLine("algorithm.advantage", ours, (DISTILLED, "algorithm.adv_estimator"))
    elif ours is None:
        advice = "algorithm.advantage has no such one: register your own (docs/algorithms.md)"
        yield Decision("algorithm.adv_estimator", name, advice)
    elif ours == "grpo" and not options.take("algorithm.norm_adv_by_std_in_grpo", True):
        sources = ("algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo")
        yield RecipeLine("algorithm.advantage", "dr_grpo", sources)
    else:
        yield RecipeLine("algorithm.advantage", ours, ("algorithm.adv_estimator",))
    if ours in ("gae", "reinforce_plus_plus"):
        gamma = options.take("algorithm.gamma", 1.0)
        if gamma != 1:
            yield RecipeLine("algorithm.gamma", gamma, ("algorithm.gamma",))
    if ours == "gae":
        lam = options.take("algorithm.lam", 1.0)
        yield RecipeLine("algorithm.gae_lambda", lam, ("algorithm.lam",))
        yield RecipeLine("critic.gae_lambda", lam, ("algorithm.lam",))
    if options.take("algorithm.use_pf_ppo", False):
        advice = "samples are not weighted anew by their rewards: register an advantage of your own"
        yield Decision("algorithm.use_pf_ppo", True, advice)
    if options.take("algorithm.filter_groups.enable", False):
        yield RecipeLine("rollout.dynamic_sampling", True, ("algorithm.filter_groups.enable",))
        rounds = options.take("algorithm.filter_groups.max_num_gen_batches", 0)
        if rounds:
            yield RecipeLine(
                "rollout.max_rounds", rounds, ("algorithm.filter_groups.max_num_gen_batches",)
            )
        prompts, _ = take_prompts(options)
        drawn = options.take("data.gen_batch_size", prompts)
        if drawn > prompts:
            yield RecipeLine("rollout.oversampling", drawn / prompts, ("data.gen_batch_size",))


WITHOUT_CLIP = ("policy_gradient", "sapo", "dro", "kl_cov")
"""Losses of a recipe that read no clip ratios."""


def translate_loss(options: ForeignOptions) -> Found:
    mode = options.take(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    loss = LOSSES.get(mode)
    if loss is None:
        advice = "algorithm.loss has no such one: register your own (docs/algorithms.md)"
        yield Decision(f"{ACTOR}.policy_loss.loss_mode", mode, advice)
    else:
        yield RecipeLine("algorithm.loss", loss, (f"{ACTOR}.policy_loss.loss_mode",))
    for side in ("low", "high") if loss not in WITHOUT_CLIP else ():
        theirs = f"{ACTOR}.clip_ratio_{side}"
        yield RecipeLine(f"algorithm.clip_{side}", options.take(theirs, 0.2), (theirs,))
    if loss == "ppo_clip":
        bound = options.take(f"{ACTOR}.clip_ratio_c", 3.0)
        yield RecipeLine("algorithm.dual_clip", bound, (f"{ACTOR}.clip_ratio_c",))
    elif loss == "dro":
        theirs = f"{ACTOR}.policy_loss.dro_beta"
        yield RecipeLine("algorithm.dro_beta", options.take(theirs, None), (theirs,))
    elif loss == "sapo":
        for sign, default in (("pos", 1.0), ("neg", 1.05)):
            ours = {"pos": "positive", "neg": "negative"}[sign]
            theirs = f"{ACTOR}.tau_{sign}"
            yield RecipeLine(f"algorithm.tau_{ours}", options.take(theirs, default), (theirs,))
    yield from _covariance(options, loss)
    yield from _aggregation(options)
    entropy = options.take(f"{ACTOR}.entropy_coeff", 0)
    if entropy:
        yield RecipeLine("algorithm.entropy_coef", entropy, (f"{ACTOR}.entropy_coeff",))


def _covariance(options: ForeignOptions, loss: str | None) -> Found:
    names = {
        "clip_cov": {
            "share": ("clip_cov_ratio", 0.0002),
            "low": ("clip_cov_lb", 1.0),
            "high": ("clip_cov_ub", 5.0),
        },
        "kl_cov": {"share": ("kl_cov_ratio", 0.0002), "kl_coef": ("ppo_kl_coef", 0.1)},
    }
    for ours, (theirs, default) in names.get(loss or "", {}).items():
        source = f"{ACTOR}.policy_loss.{theirs}"
        yield RecipeLine(f"algorithm.covariance.{ours}", options.take(source, default), (source,))


def _aggregation(options: ForeignOptions) -> Found:
    name = f"{ACTOR}.loss_agg_mode"
    mode = options.take(name, "token-mean")
    longest = take_shared(options, "data.max_response_length")
    if mode not in AGGREGATIONS:
        yield Decision(name, mode, f"algorithm.aggregation has {', '.join(AGGREGATIONS.values())}")
        return
    yield RecipeLine("algorithm.aggregation", AGGREGATIONS[mode], (name,))
    advice = f"algorithm.aggregation=constant divides by {longest}: the loss and the norm of its"
    advice += " gradient, which is clipped, differ by that factor"
    if mode == "seq-mean-token-sum":
        yield Decision(name, mode, f"{advice} from verl's, which does not divide")
    elif mode == "seq-mean-token-sum-norm":
        source = f"{ACTOR}.loss_scale_factor"
        scale = options.take(source, longest)
        if scale != longest:
            yield Decision(source, scale, f"{advice} over {scale} from verl's")


DISTILLED = "distillation.enabled"
TEACHERS = "distillation.teacher_models."


def find_teacher(options: ForeignOptions) -> str | None:
    """Return the option that names the teacher; None without one, or with several."""
    if not options.take(DISTILLED, False):
        return None
    models = [name for name in options.given if name.startswith(TEACHERS)]
    paths = [name for name in models if name.endswith(".model_path")]
    paths = [name for name in paths if options.take(name, None) is not None]
    return paths[0] if len(paths) == 1 else None


def translate_distillation(options: ForeignOptions) -> Found:
    """Yield whose log-probs are the signal; nothing without a teacher."""
    if not options.take(DISTILLED, False):
        return
    teacher = find_teacher(options)
    if teacher is None:
        paths = [value for name, value in options.below(TEACHERS).items() if "model_path" in name]
        advice = "one teacher is asked: set algorithm.advantage=distillation and teacher.path"
        yield Decision(DISTILLED, paths or True, f"{advice} (docs/algorithms.md)")
        return
    yield RecipeLine("teacher.path", options.take(teacher, ""), (teacher, DISTILLED))
    size = f"{teacher.removesuffix('model_path')}inference.tensor_model_parallel_size"
    yield from translate_renamed(options, {size: ("teacher.tp", None)})
    group = "distillation.distillation_loss"
    if options.take(f"{group}.use_task_rewards", True):
        coef = options.take(f"{group}.distillation_loss_coef", 1.0)
        sources = (f"{group}.use_task_rewards", f"{group}.distillation_loss_coef")
        yield RecipeLine("algorithm.reward_coef", 1 / coef if coef else 1.0, sources)
    kind = options.take(f"{group}.loss_mode", "k3")
    if kind != "k1" or not options.take(f"{group}.use_policy_gradient", False):
        advice = (
            "the teacher's signal is an advantage: its log-prob of each token less the policy's"
        )
        yield Decision(f"{group}.loss_mode", kind, advice)
    bounds = (f"{group}.loss_max_clamp", f"{group}.log_prob_min_clamp")
    for name in bounds:
        if options.take(name, None) is not None:
            yield Decision(name, options.given[name], "the teacher's signal has no bounds here")


def translate_kl(options: ForeignOptions) -> Found:
    in_loss = options.take(f"{ACTOR}.use_kl_loss", False)
    # With a coefficient of 0 it changes no reward.
    in_reward = options.take("algorithm.use_kl_in_reward", False) and bool(
        options.take("algorithm.kl_ctrl.kl_coef", 0.001)
    )
    where = ACTOR if in_loss else "algorithm"
    kind = {True: f"{ACTOR}.kl_loss_type", False: "algorithm.kl_penalty"}[in_loss]
    coef = {True: f"{ACTOR}.kl_loss_coef", False: "algorithm.kl_ctrl.kl_coef"}[in_loss]
    if not (in_loss or in_reward):
        return
    weight, estimator = (
        options.take(coef, 0.001),
        str(options.take(kind, "low_var_kl" if in_loss else "kl")),
    )
    if in_loss and in_reward:
        advice = "a KL is in the loss or in the reward: algorithm.kl.in_reward; here in the loss"
        yield Decision("algorithm.use_kl_in_reward", True, advice)
    switch = f"{ACTOR}.use_kl_loss" if in_loss else "algorithm.use_kl_in_reward"
    yield RecipeLine("algorithm.kl.coef", weight, (coef, switch))
    plain = estimator.removesuffix("+")
    if plain in ESTIMATORS:
        value = ESTIMATORS[plain] + ("+" if estimator.endswith("+") else "")
        yield RecipeLine("algorithm.kl.estimator", value, (kind,))
    else:
        yield Decision(kind, estimator, "algorithm.kl.estimator has k1, k2, k3 and abs")
    if where == "algorithm":
        yield RecipeLine("algorithm.kl.in_reward", True, ("algorithm.use_kl_in_reward",))
        if options.take("algorithm.kl_ctrl.type", "fixed") != "fixed":
            for ours, theirs, default in (
                ("target", "target_kl", 0.1),
                ("horizon", "horizon", 10000),
            ):
                source = f"algorithm.kl_ctrl.{theirs}"
                yield RecipeLine(f"algorithm.kl.{ours}", options.take(source, default), (source,))


def translate_correction(options: ForeignOptions) -> Found:
    weight = options.take(f"{CORRECTION}.rollout_is", None)
    # The configurations of the two programs that sample ahead switch it on.
    ahead = is_fully_async(options) or is_one_step_off(options)
    has_bypass = options.take(f"{CORRECTION}.bypass_mode", ahead)
    if has_bypass:
        yield RecipeLine("algorithm.correction.bypass", True, (f"{CORRECTION}.bypass_mode",))
        kind = options.take(f"{CORRECTION}.loss_type", "ppo_clip")
        if kind != "ppo_clip" or weight is not None:
            advice = "with bypass the loss is algorithm.loss, without weights"
            yield Decision(f"{CORRECTION}.loss_type", kind, advice)
    elif weight is not None:
        yield from _weight(options, weight)
    yield from _rejection(options, has_bypass)


def _weight(options: ForeignOptions, weight: str) -> Found:
    yield RecipeLine("algorithm.correction.weight", weight, (f"{CORRECTION}.rollout_is",))
    name = f"{CORRECTION}.rollout_is_threshold"
    low, _, high = str(options.take(name, "2.0")).rpartition("_")
    if low:
        yield RecipeLine("algorithm.correction.bound", "mask", (name,))
        yield RecipeLine("algorithm.correction.low", float(low), (name,))
    yield RecipeLine("algorithm.correction.high", float(high), (name,))
    switch = f"{CORRECTION}.rollout_is_batch_normalize"
    if options.take(switch, False):
        yield RecipeLine("algorithm.correction.normalize", True, (switch,))


def _rejection(options: ForeignOptions, has_bypass: bool) -> Found:
    """Yield one criterion of rejection; verl's bounds of k1 are ratios, here they are logs."""
    source = f"{CORRECTION}.rollout_rs"
    chosen = options.take(source, None)
    if chosen is None:
        return
    statistic, _, estimator = str(chosen).rpartition("_")
    bounds = f"{CORRECTION}.rollout_rs_threshold"
    low, _, high = str(options.take(bounds, "")).rpartition("_")
    if statistic not in REJECTIONS or not high or has_bypass:
        advice = "algorithm.correction.reject has one criterion and one bound, and none with bypass"
        yield Decision(source, chosen, f"{advice} (docs/algorithms.md)")
        return
    group = "algorithm.correction"
    yield RecipeLine(f"{group}.reject", REJECTIONS[statistic], (source,))
    yield RecipeLine(f"{group}.reject_estimator", estimator, (source,))
    of_k1 = estimator == "k1"
    above = math.log(float(high)) if of_k1 else float(high)
    yield RecipeLine(f"{group}.reject_above", above, (bounds,))
    if of_k1 and low:
        yield RecipeLine(f"{group}.reject_below", math.log(float(low)), (bounds,))


def translate_critic(options: ForeignOptions) -> Found:
    """Yield the critic of advantage=gae; without one, all that is said of critics is unread."""
    if take_shared(options, "algorithm.adv_estimator") != "gae":
        return
    path = options.take("critic.model.path", None)
    if path is not None and path != options.take("actor_rollout_ref.model.path", None):
        yield RecipeLine("critic.path", path, ("critic.model.path",))
    yield from translate_optimizer(options, "critic.optim", "critic.optimizer", 1e-5)
    mini_batch = options.take(f"{ACTOR}.ppo_mini_batch_size", 256)
    yield from passes(options, "critic", "critic", mini_batch)
    clip = options.take("critic.cliprange_value", 0.5)
    yield RecipeLine("critic.value_clip", clip, ("critic.cliprange_value",))
    warmup = options.take("trainer.critic_warmup", 0)
    if warmup:  # verl counts steps from 1, and the policy trains in the step of this number
        yield RecipeLine("critic.warmup_steps", warmup - 1, ("trainer.critic_warmup",))
    if is_megatron(options):
        yield from layout_of(options, "critic.megatron", "critic.parallel")
    else:
        yield from layout_of_fsdp(options, "critic.parallel")
    if take_shared(options, "actor_rollout_ref.hybrid_engine"):
        yield RecipeLine("critic.colocated", True, ("actor_rollout_ref.hybrid_engine",))
    yield from translate_factors(options, "critic.model", "critic.lora")

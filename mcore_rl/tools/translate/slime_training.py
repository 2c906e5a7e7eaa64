"""Converts model, layout, engines, optimizer, batches and algorithm of slime 0.3.1 into options."""

from typing import Any

from mcore_rl.config.data import DataConfig
from mcore_rl.config.training import RECOMPUTABLE
from mcore_rl.tools.translate.stages import read_num_layers, translate_ends
from mcore_rl.tools.translate.translation import (
    Decision,
    ForeignOptions,
    Found,
    RecipeLine,
    hold_longest,
    list_differing,
    translate_muon,
    translate_renamed,
)

SIZES = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
}
STAGE_ENDS = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
PLACES = ("--actor-num-nodes", "--actor-num-gpus-per-node")
ENGINE_SIZES = {
    "pp": ("--sglang-pp-size", "--sglang-pipeline-parallel-size"),
    "ep": ("--sglang-ep-size", "--sglang-expert-parallel-size", "--sglang-ep"),
    "attention_dp": ("--sglang-dp-size", "--sglang-data-parallel-size"),
}


def has_critic(options: ForeignOptions) -> bool:
    """Return whether a critic is trained beside the policy."""
    return options.take("--advantage-estimator", "grpo") == "ppo"


def first_given(options: ForeignOptions, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
    """Return the first of an option's names that is given, or the first name, and the value."""
    values = {name: options.take(name, None) for name in names}
    given = [name for name, value in values.items() if value is not None]
    return (given[0], values[given[0]]) if given else (names[0], default)


def translate_model(options: ForeignOptions) -> Found:
    path = options.take("--hf-checkpoint", "")
    yield RecipeLine("model.path", str(path).rstrip("/"), ("--hf-checkpoint",))
    yield RecipeLine("model.dtype", "bfloat16")
    yield from _engines_precision(str(path).rstrip("/"))
    if options.take("--fp16", False):
        yield Decision("--fp16", True, "model.dtype is bfloat16 or float32")
    loaded = options.take("--load", None)
    if loaded is not None and loaded != options.take("--save", None):
        advice = "a run continues from its own folder, and begins with model.path in HuggingFace's"
        yield Decision("--load", loaded, f"{advice} format: convert the checkpoint")


def _engines_precision(path: str) -> Found:
    """Yield FP8 or a decision if `path`, which slime's engines serve as it is, is quantized."""
    name = path.rpartition("/")[2].lower()
    if "fp8" in name:
        yield RecipeLine("rollout.quantization", "fp8", ("--hf-checkpoint",))
        advice = "engines serve this in FP8 there, by rollout.quantization here; trainer ranks"
        advice += " would begin with its rounded weights: set model.path to the model in bfloat16"
        yield Decision("--hf-checkpoint", path, advice)
    elif "int4" in name:
        advice = "engines serve this in INT4 there, and bfloat16 or FP8 here, which take more"
        advice += " memory: set rollout.quantization, rollout.tp and rollout.engines"
        yield Decision("--hf-checkpoint", path, advice)


def trainer_ranks(options: ForeignOptions) -> int:
    """Return how many GPUs the trainer has."""
    return options.take(PLACES[0], 1) * options.take(PLACES[1], 8)


def translate_layout(options: ForeignOptions) -> Found:
    """Yield parallel.*, critic.parallel.* with a critic, and what is computed again."""
    groups = ["parallel", "critic.parallel"] if has_critic(options) else ["parallel"]
    for ours in groups:
        yield from _sizes(options, ours)
    yield from _recompute(options)


def _sizes(options: ForeignOptions, ours: str) -> Found:
    sizes = {name: options.take(theirs, 1) for name, theirs in SIZES.items()}
    ranks = sizes["tp"] * sizes["pp"] * sizes["cp"]
    yield RecipeLine(f"{ours}.dp", max(trainer_ranks(options) // ranks, 1), PLACES)
    for name, theirs in SIZES.items():
        if sizes[name] != 1:
            yield RecipeLine(f"{ours}.{name}", sizes[name], (theirs,))
    # Megatron's own default of the experts' tensor parallelism is that of the dense layers.
    etp = options.take("--expert-tensor-parallel-size", sizes["tp"])
    if etp != 1 and (sizes["ep"] > 1 or "--expert-tensor-parallel-size" in options.given):
        yield RecipeLine(f"{ours}.etp", etp, ("--expert-tensor-parallel-size",))
    yield from _stages(options, ours, sizes["pp"])


def _stages(options: ForeignOptions, ours: str, pp: int) -> Found:
    chunks = options.take("--num-virtual-stages-per-pipeline-rank", None)
    if chunks is not None:
        yield RecipeLine(f"{ours}.vpp", chunks, ("--num-virtual-stages-per-pipeline-rank",))
    ends = {name: options.take(name, None) for name in STAGE_ENDS}
    has_ends = any(number is not None for number in ends.values())
    virtual = options.take("--num-layers-per-virtual-pipeline-stage", None)
    layers = options.take("--num-layers", None) if has_ends or virtual is not None else None
    if layers is None and has_ends:
        layers = read_num_layers(str(options.take("--hf-checkpoint", "")))
    if virtual is not None and layers is not None:
        names = ("--num-layers-per-virtual-pipeline-stage", "--num-layers")
        yield RecipeLine(f"{ours}.vpp", layers // pp // virtual, names)
    elif virtual is not None:
        advice = f"set {ours}.vpp: layers of a pipeline rank by this"
        yield Decision("--num-layers-per-virtual-pipeline-stage", virtual, advice)
    layout = options.take("--pipeline-model-parallel-layout", None)
    if layout is not None:
        advice = f"set {ours}.stage_layers, which counts the layers of each stage"
        yield Decision("--pipeline-model-parallel-layout", layout, advice)
    is_whole = chunks is None
    yield from translate_ends(ours, pp, ends, layers if is_whole else None, ("--num-layers",))


def _recompute(options: ForeignOptions) -> Found:
    granularity = options.take("--recompute-granularity", None)
    if options.take("--recompute-activations", False):
        granularity = granularity or "selective"
    sources = ("--recompute-granularity", "--recompute-modules", "--recompute-activations")
    if granularity == "full":
        yield RecipeLine("train.recompute", "full", sources[:1])
        for name in ("recompute_method", "recompute_num_layers"):
            theirs = f"--{name.replace('_', '-')}"
            yield from translate_renamed(options, {theirs: (f"train.megatron.{name}", None)})
    elif granularity == "selective":
        modules = options.take_list("--recompute-modules", ["core_attn"])
        known = [module for module in modules if module in RECOMPUTABLE]
        yield RecipeLine("train.recompute", "+".join(known) or "none", sources)
        for module in set(modules) - set(known):
            yield Decision("--recompute-modules", module, "recomputed by no recipe")
    elif granularity is not None:
        yield Decision("--recompute-granularity", granularity, "train.recompute has others")


def translate_engines(options: ForeignOptions) -> Found:
    """Yield how many engines there are, where, and what each is made of."""
    ranks = options.take("--rollout-num-gpus-per-engine", 1)
    pp_name, pp = first_given(options, ENGINE_SIZES["pp"], 1)
    if ranks // pp > 1:
        yield RecipeLine("rollout.tp", ranks // pp, ("--rollout-num-gpus-per-engine", pp_name))
    for ours, names in ENGINE_SIZES.items():
        name, size = first_given(options, names, 1)
        if size > 1:
            yield RecipeLine(f"rollout.{ours}", size, (name,))
    yield from _placement(options, ranks)
    share = options.take("--sglang-mem-fraction-static", None)
    advice = "set rollout.kv_cache_len, in tokens per engine, by what `mcore-rl plan` says is free"
    yield Decision("--sglang-mem-fraction-static", share, advice)
    yield from _concurrency(options)


def _concurrency(options: ForeignOptions) -> Found:
    """Yield the requests of an engine, which slime bounds before the server, and SGLang in it."""
    names = ("--sglang-server-concurrency", "--sglang-max-running-requests")
    bounds = [options.take(names[0], 512), options.take(names[1], None)]
    least = min(bound for bound in bounds if bound is not None)
    yield RecipeLine("rollout.max_concurrency", least, names)


def _placement(options: ForeignOptions, ranks: int) -> Found:
    gpus = trainer_ranks(options)
    colocated = options.take("--colocate", False)
    given = options.take("--rollout-num-gpus", None)
    name = "--rollout-num-gpus" if given is not None or not colocated else "--colocate"
    if given is None and not colocated:
        advice = "set rollout.engines: GPUs for rollouts by those of an engine"
        yield Decision(name, None, advice)
    elif given == 0:
        yield Decision(name, 0, "a recipe starts its own engines: set rollout.engines")
    else:
        sources = (name, "--rollout-num-gpus-per-engine", *PLACES)
        yield RecipeLine("rollout.engines", max((given or gpus) // ranks, 1), sources)
    if colocated:
        yield RecipeLine("cluster.colocated", True, ("--colocate",))
        # A recipe with engines on the trainer's GPUs has to have these.
        yield RecipeLine("rollout.stage_weights", False)
        yield RecipeLine("rollout.restarts", 0)
    yield from _offload(options, colocated)
    if options.take(PLACES[0], 1) > 1:
        advice = "`mcore-rl submit` finds it from the ranks of the recipe (docs/launch.md); on a"
        advice += " Ray of your own set cluster.address and cluster.num_nodes"
        yield Decision(PLACES[0], options.take(PLACES[0], 1), advice)


def _offload(options: ForeignOptions, colocated: bool) -> Found:
    kept = colocated and options.take("--no-offload-train", False)
    names = [name for name in ("--offload", "--offload-train") if options.take(name, False)]
    if names and not colocated:
        advice = "the trainer's memory is freed for engines on its GPUs only: cluster.colocated"
        yield Decision(names[0], True, advice)
    elif colocated:
        sources = (*names, "--colocate", *(["--no-offload-train"] if kept else []))
        yield RecipeLine("cluster.offload", not kept, sources)
    if options.take("--no-offload-rollout", False):
        advice = "engines on the trainer's GPUs always release their memory"
        yield Decision("--no-offload-rollout", True, advice)


SCHEDULES = ("constant", "linear", "cosine")
ADVANTAGES = {
    "grpo": "grpo",
    "gspo": "grpo",
    "cispo": "grpo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "ppo": "gae",
}
LOSSES = {"gspo": "gspo", "cispo": "cispo"}
ESTIMATORS = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}
OWN_ADVANTAGE = "register an advantage of your own (docs/algorithms.md)"
WITHOUT_COUNTERPART: dict[str, tuple[Any, str]] = {
    "--lora-rank": (
        0,
        "set train.lora.rank, alpha and targets by names of HuggingFace modules (docs/lora.md)",
    ),
    "--use-opsm": (False, "algorithm.correction.reject=sequence leaves out whole sequences"),
    "--custom-advantage-function-path": (None, OWN_ADVANTAGE),
    "--custom-tis-function-path": (None, "algorithm.correction has weights and rejection"),
    "--custom-pg-loss-reducer-function-path": (None, "algorithm.aggregation has others"),
    "--custom-loss-function-path": (None, "register a loss of your own (docs/algorithms.md)"),
    "--use-unbiased-kl": (False, "algorithm.kl.estimator=k3+ has the gradient of the KL itself"),
    "--ref-update-interval": (None, "the reference is model.path for the whole run"),
    "--reset-optimizer-states": (False, "the optimizer's moments are kept"),
    "--use-stateless-adam": (False, "the optimizer's moments are kept"),
    "--disable-rewards-normalization": (False, OWN_ADVANTAGE),
    "--disable-compute-advantages-and-returns": (False, OWN_ADVANTAGE),
    "--freeze-params-name-list": (None, "train.freeze_router and train.vision freeze parts"),
    "--only-train-params-name-list": (None, "train.freeze_router and train.vision freeze parts"),
    "--mask-offpolicy-in-partial-rollout": (False, "algorithm.correction weighs such tokens"),
    "--keep-old-actor": (False, "rollout.mode=async has algorithm.correction instead"),
    "--custom-model-provider-path": (None, "families of models are tables here (docs/models.md)"),
    "--megatron-config-path": (None, "set critic.*, the critic's own options"),
}


MUON = {
    "momentum": "--muon-momentum",
    "nesterov": "--muon-use-nesterov",
    "scale_mode": "--muon-scale-mode",
    "fp32_matmul_prec": "--muon-fp32-matmul-prec",
    "num_ns_steps": "--muon-num-ns-steps",
    "extra_scale_factor": "--muon-extra-scale-factor",
}


def translate_optimizer(options: ForeignOptions) -> Found:
    """Yield the policy's optimizer, and the critic's, which has the same options."""
    for ours in ["train.optimizer", *(["critic.optimizer"] if has_critic(options) else [])]:
        table = {
            "--lr": (f"{ours}.lr", 1e-6),
            "--weight-decay": (f"{ours}.weight_decay", 0.01),
            "--adam-beta1": (f"{ours}.beta1", 0.9),
            "--adam-beta2": (f"{ours}.beta2", 0.999),
            "--adam-eps": (f"{ours}.eps", 1e-8),
            "--clip-grad": (f"{ours}.clip_grad", 1.0),
            "--min-lr": (f"{ours}.min_lr", None),
        }
        yield from translate_renamed(options, table)
        yield from translate_muon(options, "--optimizer", ours, MUON)
        yield from _schedule(options, ours)


def _schedule(options: ForeignOptions, ours: str) -> Found:
    style = options.take("--lr-decay-style", "linear")
    if style in SCHEDULES:
        yield RecipeLine(f"{ours}.schedule", style, ("--lr-decay-style",))
    else:
        advice = f"{ours}.schedule is one of {', '.join(SCHEDULES)}"
        yield Decision("--lr-decay-style", style, advice)
    if options.take("--lr-decay-iters", None) is not None:
        advice = "a schedule ends with run.steps"
        yield Decision("--lr-decay-iters", options.take("--lr-decay-iters", 0), advice)
    steps = options.take("--lr-warmup-iters", 0)
    share = options.take("--lr-warmup-fraction", None)
    total = options.take("--num-rollout", None)
    if steps:
        yield RecipeLine(f"{ours}.warmup_steps", steps, ("--lr-warmup-iters",))
    elif share and total:
        sources = ("--lr-warmup-fraction", "--num-rollout")
        yield RecipeLine(
            f"{ours}.warmup_steps", round(share * total * count_mini_batches(options)), sources
        )
    elif share:
        advice = f"set {ours}.warmup_steps to this share of all optimizer steps"
        yield Decision("--lr-warmup-fraction", share, advice)


def count_mini_batches(options: ForeignOptions) -> int:
    """Return the optimizer steps of a rollout, which is what slime reads at once."""
    samples = options.take("--rollout-batch-size", 1) * options.take("--n-samples-per-prompt", 1)
    per_step = options.take("--global-batch-size", samples)
    return options.take("--num-steps-per-rollout", None) or max(round(samples / per_step), 1)


def translate_step(options: ForeignOptions) -> Found:
    """Yield what a step takes: prompts, mini-batches, micro-batches."""
    prompts = options.take("--rollout-batch-size", None)
    if prompts is None:
        yield Decision("--rollout-batch-size", None, "slime wants it: set rollout.prompts_per_step")
    else:
        yield RecipeLine("rollout.prompts_per_step", prompts, ("--rollout-batch-size",))
    samples = (prompts or 1) * options.take("--n-samples-per-prompt", 1)
    sources = ("--rollout-batch-size", "--n-samples-per-prompt", "--global-batch-size")
    sources = (*sources, "--num-steps-per-rollout")
    yield RecipeLine("train.mini_batches", count_mini_batches(options), sources)
    if has_critic(options):
        yield RecipeLine("critic.mini_batches", count_mini_batches(options), sources)
    per_step = options.take("--global-batch-size", samples)
    if samples % per_step:
        advice = f"does not divide the {samples} samples of a step: train.mini_batches is rounded"
        yield Decision("--global-batch-size", per_step, advice)
    yield from translate_micro_batches(options)
    yield from translate_renamed(options, {"--log-probs-chunk-size": ("train.logprob_chunk", None)})
    if options.take("--use-rollout-routing-replay", False):
        yield RecipeLine("train.router_replay", "engine", ("--use-rollout-routing-replay",))
    elif options.take("--use-routing-replay", False):
        yield RecipeLine("train.router_replay", "old_pass", ("--use-routing-replay",))


def translate_micro_batches(options: ForeignOptions) -> Found:
    """Yield the tokens of a micro-batch."""
    name = "train.max_tokens_per_microbatch"
    if options.take("--use-dynamic-batch-size", False):
        tokens = options.take("--max-tokens-per-gpu", None)
        if tokens is None:
            advice = f"slime wants --max-tokens-per-gpu with it: set {name}"
            yield Decision("--use-dynamic-batch-size", True, advice)
            return
        # slime multiplies by the ranks that share a sequence, too.
        sources = ("--max-tokens-per-gpu", "--use-dynamic-batch-size", SIZES["cp"])
        held = tokens * options.take(SIZES["cp"], 1)
        yield from hold_longest(name, held, _longest(options), sources)
        return
    number = options.take("--micro-batch-size", 1)
    if longest := _longest(options):
        yield RecipeLine(name, number * longest, ("--micro-batch-size",))
        return
    advice = f"set {name}: sequences of a micro-batch, times the tokens of the longest"
    yield Decision("--micro-batch-size", number, advice)


def _longest(options: ForeignOptions) -> int:
    """Return the greatest length of a sequence in the recipe; 0: unknown."""
    answer = options.take("--rollout-max-response-len", 0)
    context = options.take("--rollout-max-context-len", 0)
    default = max(context - answer, 0) or DataConfig().max_prompt_len
    return answer + options.take("--rollout-max-prompt-len", default) if answer else 0


def translate_algorithm(options: ForeignOptions) -> Found:
    kind = options.take("--advantage-estimator", "grpo")
    ours = ADVANTAGES.get(kind)
    plain = options.take("--disable-grpo-std-normalization", False)
    if ours is None:
        yield Decision("--advantage-estimator", kind, OWN_ADVANTAGE)
    elif ours == "grpo" and plain:
        sources = ("--advantage-estimator", "--disable-grpo-std-normalization")
        yield RecipeLine("algorithm.advantage", "dr_grpo", sources)
    else:
        yield RecipeLine("algorithm.advantage", ours, ("--advantage-estimator",))
    yield RecipeLine("algorithm.loss", LOSSES.get(kind, "ppo_clip"), ("--advantage-estimator",))
    if options.take("--normalize-advantages", False) and ours == "grpo":
        yield Decision("--normalize-advantages", True, OWN_ADVANTAGE)
    low = options.take("--eps-clip", 0.2)
    yield RecipeLine("algorithm.clip_low", low, ("--eps-clip",))
    high = options.take("--eps-clip-high", low)
    yield RecipeLine("algorithm.clip_high", high, ("--eps-clip-high",))
    by_token = options.take("--calculate-per-token-loss", False)
    mean = "token_mean" if by_token else "sequence_mean"
    yield RecipeLine("algorithm.aggregation", mean, ("--calculate-per-token-loss",))
    table: dict[str, tuple[str, Any]] = {
        "--eps-clip-c": ("algorithm.dual_clip", None),
        "--entropy-coef": ("algorithm.entropy_coef", 0.0),
    }
    yield from translate_renamed(options, table)
    yield from _kl(options)
    yield from _correction(options)
    yield from _other_goals(options)
    yield from list_differing(options, WITHOUT_COUNTERPART)


def _kl(options: ForeignOptions) -> Found:
    in_reward = options.take("--kl-coef", 0.0)
    in_loss = options.take("--use-kl-loss", False)
    kind = options.take("--kl-loss-type", "k1")
    if in_loss:
        weight = options.take("--kl-loss-coef", 0.0)
        yield RecipeLine("algorithm.kl.coef", weight, ("--kl-loss-coef", "--use-kl-loss"))
    elif in_reward:
        yield RecipeLine("algorithm.kl.coef", in_reward, ("--kl-coef",))
        yield RecipeLine("algorithm.kl.in_reward", True, ("--kl-coef",))
    if in_loss and in_reward:
        advice = "a KL is in the loss or in the reward: algorithm.kl.in_reward; here in the loss"
        yield Decision("--kl-coef", in_reward, advice)
    if kind not in ESTIMATORS:
        yield Decision("--kl-loss-type", kind, "algorithm.kl.estimator has k1, k2, k3 and abs")
    elif in_loss or in_reward or kind != "k1":
        yield RecipeLine("algorithm.kl.estimator", ESTIMATORS[kind], ("--kl-loss-type",))


def _correction(options: ForeignOptions) -> Found:
    if options.take("--use-rollout-logprobs", False):
        yield RecipeLine("algorithm.correction.bypass", True, ("--use-rollout-logprobs",))
    if options.take("--use-tis", False):
        high = options.take("--tis-clip", 2.0)
        low = options.take("--tis-clip-low", 0)
        yield RecipeLine("algorithm.correction.weight", "token", ("--use-tis",))
        yield RecipeLine("algorithm.correction.high", high, ("--tis-clip",))
        if low:
            advice = "with algorithm.correction.bound=mask, weights below `low` become 0, not `low`"
            yield Decision("--tis-clip-low", low, advice)


def _other_goals(options: ForeignOptions) -> Found:
    kind = options.take("--loss-type", "policy_loss")
    if kind != "policy_loss":
        yield Decision("--loss-type", kind, "register a loss of your own (docs/algorithms.md)")
    if options.take("--use-opd", False):
        # Nothing of it is in the recipe, which refuses reward_coef without a teacher.
        advice = "set algorithm.advantage=distillation, algorithm.loss=policy_gradient,"
        advice += " algorithm.reward_coef=1 and teacher.path, a model in HuggingFace's format"
        teacher = options.take("--opd-teacher-load", None)
        yield Decision("--use-opd, --opd-type, --opd-teacher-load", teacher, advice)
        coef = options.take("--opd-kl-coef", 1.0)
        if coef != 1:
            advice = "algorithm.reward_coef weighs the rewards beside the teacher: set 1 by this"
            yield Decision("--opd-kl-coef", coef, advice)


def translate_critic(options: ForeignOptions) -> Found:
    """Yield the critic of --advantage-estimator ppo; without one, its options are unread."""
    if options.take("--advantage-estimator", "grpo") in ("ppo", "reinforce_plus_plus"):
        gamma = options.take("--gamma", 1.0)
        if gamma != 1:
            yield RecipeLine("algorithm.gamma", gamma, ("--gamma",))
    if not has_critic(options):
        return
    lam = options.take("--lambd", 1.0)
    yield RecipeLine("algorithm.gae_lambda", lam, ("--lambd",))
    yield RecipeLine("critic.gae_lambda", lam, ("--lambd",))
    table = {
        "--value-clip": ("critic.value_clip", 0.2),
        "--num-critic-only-steps": ("critic.warmup_steps", 0),
    }
    yield from translate_renamed(options, table)
    yield RecipeLine("critic.colocated", True)

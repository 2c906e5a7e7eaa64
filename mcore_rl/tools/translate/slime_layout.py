"""Model, layout, engines and placement of slime 0.3.1, as options of a recipe."""

from typing import Any

from mcore_rl.config.training import RECOMPUTABLE
from mcore_rl.tools.translate.translation import (
    Decision,
    ForeignOptions,
    Found,
    RecipeLine,
    renamed,
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
    if options.take("--fp16", False):
        yield Decision("--fp16", True, "model.dtype is bfloat16 or float32")
    loaded = options.take("--load", None)
    if loaded is not None and loaded != options.take("--save", None):
        advice = "a run continues from its own folder, and begins with model.path in HuggingFace's"
        yield Decision("--load", loaded, f"{advice} format: convert the checkpoint")


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
    ends = [options.take(name, None) for name in STAGE_ENDS]
    given = tuple(name for name in STAGE_ENDS if options.take(name, None) is not None)
    virtual = options.take("--num-layers-per-virtual-pipeline-stage", None)
    layers = options.take("--num-layers", None) if given or virtual is not None else None
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
    if not given:
        return
    middle = pp - len(given)
    rest = (layers or 0) - sum(end for end in ends if end is not None)
    if layers is None or middle < 1 or rest % middle or chunks is not None:
        advice = f"set {ours}.stage_layers: the layers of each pipeline stage"
        for name in given:
            yield Decision(name, options.take(name, None), advice)
        return
    first = [ends[0]] if ends[0] is not None else []
    last = [ends[1]] if ends[1] is not None else []
    stages = [*first, *[rest // middle] * middle, *last]
    yield RecipeLine(f"{ours}.stage_layers", stages, (*given, "--num-layers"))


def _recompute(options: ForeignOptions) -> Found:
    granularity = options.take("--recompute-granularity", None)
    if options.take("--recompute-activations", False):
        granularity = granularity or "selective"
    sources = ("--recompute-granularity", "--recompute-modules", "--recompute-activations")
    if granularity == "full":
        yield RecipeLine("train.recompute", "full", sources[:1])
        for name in ("recompute_method", "recompute_num_layers"):
            theirs = f"--{name.replace('_', '-')}"
            yield from renamed(options, {theirs: (f"train.megatron.{name}", None)})
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
    yield from renamed(options, {"--sglang-server-concurrency": ("rollout.max_concurrency", 512)})


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

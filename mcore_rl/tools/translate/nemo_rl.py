"""Reads configurations of NeMo-RL 0.7 for GRPO, PPO, SFT and DPO, and makes recipes of them.

A configuration's `defaults` name others; overrides are key=value. Data, rewards, optimizers and the
run itself are converted here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mcore_rl.tools.translate.hydra import flatten, load_tree, parse_overrides
from mcore_rl.tools.translate.nemo_algorithm import (
    translate_advantage,
    translate_critic,
    translate_loss,
)
from mcore_rl.tools.translate.nemo_policy import (
    is_megatron,
    is_ppo,
    loop_of,
    translate_batches,
    translate_engines,
    translate_layout,
    translate_micro_batches,
    translate_model,
    translate_sampling,
    translate_training,
)
from mcore_rl.tools.translate.nemo_tuning import is_tuning, reason_for_tuning, translate_tuning
from mcore_rl.tools.translate.nemo_unneeded import reason_of
from mcore_rl.tools.translate.translation import (
    Decision,
    ForeignOptions,
    Found,
    RecipeLine,
    Translation,
    account,
    list_differing,
    translate_muon,
    translate_renamed,
    translate_switched,
)

ARITHMETIC = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": lambda a, b: max(a, b),
}
"""Functions that NeMo-RL's configurations call in ${...}."""
REPLACES = "_override_"
"""A group that has it takes the place of the inherited one, instead of changing it."""


def read_nemo_rl(arguments: Sequence[str]) -> ForeignOptions:
    """Return the options of a configuration and of overrides; later ones win.

    A whole command line may have what runs NeMo-RL: `uv run examples/run_grpo.py --config
    <file> key=value`. Raises ValueError naming the file or the override that cannot be read.
    """
    words = list(arguments)
    programs = [i for i, word in enumerate(words) if word.endswith(".py")]
    words = words[programs[-1] + 1 :] if programs else words
    tree = OmegaConf.create({})
    files = []
    overrides = []
    for word in words:
        name = word.removeprefix("--config=")
        if word == "--config":
            continue
        if name.endswith((".yaml", ".yml")) and "=" not in name:
            files.append(name)
            tree = _inherit(tree, _load(Path(name)), Path(name))
        else:
            overrides.append(word)
    given = parse_overrides(overrides)
    for name, value in given.items():
        OmegaConf.update(tree, name, value, merge=False, force_add=True)
    if not files:
        return ForeignOptions(given, is_whole=False)
    return ForeignOptions(flatten(_resolve(tree, files[-1])), is_whole=True)


def _load(path: Path, readers: tuple[Path, ...] = ()) -> DictConfig:
    if path in readers:
        raise ValueError(f"{path}: its `defaults` lead back to itself")
    tree = load_tree(path, f", which {readers[-1]} names in `defaults`" if readers else "")
    if not isinstance(tree, DictConfig):
        raise ValueError(f"{path}: no configuration in YAML: it is a list")
    named: Any = tree.pop("defaults", None) or []
    merged = OmegaConf.create({})
    for name in [named] if isinstance(named, str) else named:
        merged = _inherit(merged, _load(path.parent / str(name), (*readers, path)), path)
    return _inherit(merged, tree, path)


def _inherit(parent: DictConfig, child: DictConfig, path: Path) -> DictConfig:
    for name in list(child):
        group = child._get_node(name)
        if isinstance(group, DictConfig) and not group._is_none() and REPLACES in group:
            del group[REPLACES]
            parent.pop(name, None)
    try:
        merged = OmegaConf.merge(parent, child)
    except OmegaConfBaseException as error:
        raise ValueError(
            f"{path}: it cannot be merged with its `defaults`: {error}; a group with"
            f" {REPLACES}: true takes the place of the inherited one"
        ) from None
    assert isinstance(merged, DictConfig), type(merged)
    return merged


def _resolve(tree: DictConfig, file: str) -> dict[str, Any]:
    for name, function in ARITHMETIC.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    try:
        content = OmegaConf.to_container(tree, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        told = str(error).splitlines()[0]
        raise ValueError(
            f"{file}: {error.full_key} cannot be computed: {told}; set what it names, or give"
            f" {error.full_key}=<value>"
        ) from None
    finally:
        for name in ARITHMETIC:
            OmegaConf.clear_resolver(name)
    assert isinstance(content, dict), type(content)
    return {str(name): value for name, value in content.items()}


NO_END = 100_000
"""From so many steps on, it is the epochs that end a run."""
REWARDS = {"math": "math", "math_multi_reward": "math", "code": "code"}
"""Environments, and the file under recipes/rewards/ that judges the same answers."""
SETS = {"train": "data.train", "validation": "eval.data"}
COLUMNS = "write the columns prompt, data_source, reward_model and extra_info (docs/recipes.md)"
WITHOUT_COUNTERPART: dict[str, tuple[Any, str]] = {
    "data.use_multiple_dataloader": (False, "data.sources mixes files by weight (docs/data.md)"),
    "data.num_prompts_per_dataloader": (None, "data.sources mixes files by weight"),
    "data.custom_dataloader": (None, "data.curriculum and data.sources choose prompts"),
    "data.dataset_name": (None, COLUMNS),
    "data.prompt_file": (None, COLUMNS),
    "data.default.prompt_file": (None, COLUMNS),
    "data.default.system_prompt_file": (None, COLUMNS),
    "checkpointing.checkpoint_must_save_by": (None, "a job that is told to end saves first"),
}


def translate_data(options: ForeignOptions) -> Found:
    """Yield the files of prompts; sets that have a name are left to the user."""
    for theirs, ours in SETS.items():
        group = f"data.{theirs}"
        several: Any = options.take(group, None)
        path = options.take(f"{group}.data_path", None)
        below = options.below(f"{group}.", but=("seed",))
        yield RecipeLine(ours, [path] if path else [], (f"{group}.data_path",))
        if several:
            advice = f"give their files as {ours}, or data.sources mixes them by weight"
            yield Decision(group, several, advice)
        for name, value in below.items():
            if name == "split_validation_size" and value:
                yield Decision(f"{group}.{name}", value, "set eval.data, a file of its own")
            elif name != "data_path":
                yield Decision(f"{group}.{name}", value, COLUMNS)
    yield from translate_renamed(options, {"data.shuffle": ("data.shuffle", None)})
    yield from list_differing(options, WITHOUT_COUNTERPART)


def translate_reward(options: ForeignOptions) -> Found:
    name = options.take("data.default.env_name", "math")
    if name in REWARDS:
        path = f"recipes/rewards/{REWARDS[name]}.py"
        yield RecipeLine("reward.path", path, ("data.default.env_name",))
    else:
        advice = "set reward.path (docs/rewards.md), or agents.environment (docs/agents.md)"
        yield Decision("data.default.env_name", name, advice)
    group = f"{loop_of(options)}.reward_shaping"
    if options.take(f"{group}.enabled", False):
        for ours, theirs, default in (("buffer_len", "length", 128), ("penalty", "penalty", 1)):
            source = f"{group}.overlong_buffer_{theirs}"
            value = options.take(source, default)
            yield RecipeLine(f"reward.overlong_{ours}", value, (source, f"{group}.enabled"))
        bound = options.take(f"{group}.max_response_length", None)
        if bound is not None:
            advice = "the penalty here grows over the last tokens before rollout.max_response_len"
            yield Decision(f"{group}.max_response_length", bound, advice)


def translate_run(options: ForeignOptions) -> Found:
    """Yield steps, saves, evaluations, folder and trackers of a loop that samples."""
    loop = loop_of(options)
    yield from translate_keeping(options)
    steps = options.take(f"{loop}.max_num_steps", 1_000_000)
    epochs = options.take(f"{loop}.max_num_epochs", 1)
    if steps < NO_END or epochs <= 0:  # no number of epochs ends the run
        yield RecipeLine("run.steps", steps, (f"{loop}.max_num_steps",))
    else:
        sources = (f"{loop}.max_num_epochs", f"{loop}.max_num_steps")
        yield RecipeLine("run.epochs", float(epochs), sources)
    table: dict[str, tuple[str, Any]] = {
        f"{loop}.max_val_samples": ("eval.max_prompts", None),
    }
    yield from _translate_validation(options, loop)
    yield from translate_renamed(options, table)
    every = options.take(f"{loop}.val_period", 10)
    yield RecipeLine("eval.every_steps", max(every, 0), (f"{loop}.val_period",))


def translate_keeping(options: ForeignOptions) -> Found:
    """Yield folder, saves, seed and trackers, whatever the loop is."""
    loop = loop_of(options)
    folder = options.take("checkpointing.checkpoint_dir", f"results/{loop}")
    yield RecipeLine("run.dir", folder, ("checkpointing.checkpoint_dir",))
    saves = options.take("checkpointing.save_period", 10)
    if options.take("checkpointing.enabled", True):
        sources = ("checkpointing.save_period", "checkpointing.enabled")
        yield RecipeLine("checkpoint.every_steps", saves, sources)
        kept = options.take("checkpointing.keep_top_k", 3)
        yield RecipeLine("checkpoint.keep", kept, ("checkpointing.keep_top_k",))
        advice = "there the best checkpoints are kept, here the newest: set checkpoint.keep_best"
        metric = options.take("checkpointing.metric_name", None)
        yield Decision("checkpointing.metric_name", metric, advice)
    yield from translate_renamed(options, {f"{loop}.seed": ("run.seed", 42)})
    yield from _trackers(options)


def _translate_validation(options: ForeignOptions, loop: str) -> Found:
    """Yield how held-out answers are drawn, which versions after 0.7.0 name."""
    number_name = f"{loop}.val_num_generations_per_prompt"
    number = options.take(number_name, 1)
    generation = "policy.generation"
    names = {ours: f"{generation}.val_{ours}" for ours in ("temperature", "top_p")}
    values = {ours: options.take(theirs, None) for ours, theirs in names.items()}
    if values["temperature"]:
        yield RecipeLine("eval.samples", number, (number_name,))
        for ours, theirs in names.items():
            if values[ours]:
                yield RecipeLine(f"eval.{ours}", values[ours], (theirs,))
    if number > 1:
        yield RecipeLine("eval.pass_k", number, (number_name,))
    of_training = options.take(f"{generation}.top_k", None)
    top_k = options.take(f"{generation}.val_top_k", of_training)
    if top_k != of_training:
        advice = "held-out samples are drawn with rollout.top_k"
        yield Decision(f"{generation}.val_top_k", top_k, advice)
    first = options.take(f"{loop}.val_start_at", -1)
    if first > 0:
        advice = "held-out prompts are evaluated from the start, every eval.every_steps steps"
        yield Decision(f"{loop}.val_start_at", first, advice)


def _trackers(options: ForeignOptions) -> Found:
    project = f"{loop_of(options)}-dev"
    names = ("logger.wandb_enabled", "logger.wandb.project")
    yield from translate_switched(options, *names, "log.wandb_project", project)
    names = ("logger.swanlab_enabled", "logger.swanlab.project")
    yield from translate_switched(options, *names, "log.swanlab_project", project)
    names = ("logger.mlflow_enabled", "logger.mlflow.tracking_uri")
    yield from translate_switched(options, *names, "log.mlflow_uri", "http://localhost:5000")
    yield from translate_renamed(
        options, {"logger.tensorboard_enabled": ("log.tensorboard", False)}
    )


SCHEDULES = ("constant", "linear", "cosine")
MUON = ("momentum", "nesterov", "scale_mode", "num_ns_steps", "extra_scale_factor")


def translate_optimizer(options: ForeignOptions, role: str, ours: str) -> Found:
    """Yield the optimizer of `role`, policy or value, as options under `ours`."""
    clip_name = f"{role}.max_grad_norm"
    clip = options.take(clip_name, 1.0)
    if not is_megatron(options, role):
        yield from _torch_optimizer(options, f"{role}.optimizer", ours)
        yield RecipeLine(f"{ours}.clip_grad", clip, (clip_name,))
        schedule = options.take(f"{role}.scheduler", None)
        if schedule is not None:
            advice = f"set {ours}.warmup_steps and {ours}.schedule, which is one of"
            yield Decision(f"{role}.scheduler", schedule, f"{advice} {', '.join(SCHEDULES)}")
        return
    theirs = f"{role}.megatron_cfg.optimizer"
    own_clip = options.take(f"{theirs}.clip_grad", clip)
    yield RecipeLine(f"{ours}.clip_grad", own_clip, (f"{theirs}.clip_grad", clip_name))
    table: dict[str, tuple[str, Any]] = {
        f"{theirs}.lr": (f"{ours}.lr", 5e-6),
        f"{theirs}.weight_decay": (f"{ours}.weight_decay", 0.01),
        f"{theirs}.adam_beta1": (f"{ours}.beta1", 0.9),
        f"{theirs}.adam_beta2": (f"{ours}.beta2", 0.999),
        f"{theirs}.adam_eps": (f"{ours}.eps", 1e-8),
        f"{theirs}.use_precision_aware_optimizer": (
            f"{ours}.megatron.use_precision_aware_optimizer",
            True,
        ),
    }
    yield from translate_renamed(options, table)
    fields = {field: f"{theirs}.muon_{field}" for field in MUON}
    yield from translate_muon(options, f"{theirs}.optimizer", ours, fields)
    name = f"{theirs}.optimizer_cpu_offload"
    if options.take(name, False):
        yield RecipeLine(f"{ours}.megatron.optimizer_cpu_offload", True, (name,))
    yield from _schedule(options, role, ours)


def _torch_optimizer(options: ForeignOptions, theirs: str, ours: str) -> Found:
    kwargs = f"{theirs}.kwargs"
    table: dict[str, tuple[str, Any]] = {
        f"{kwargs}.lr": (f"{ours}.lr", 5e-6),
        f"{kwargs}.weight_decay": (f"{ours}.weight_decay", 0.01),
        f"{kwargs}.eps": (f"{ours}.eps", 1e-8),
    }
    yield from translate_renamed(options, table)
    for i, beta in enumerate(options.take(f"{kwargs}.betas", [0.9, 0.999]), 1):
        yield RecipeLine(f"{ours}.beta{i}", beta, (f"{kwargs}.betas",))
    kind = options.take(f"{theirs}.name", "torch.optim.AdamW")
    if not kind.endswith(("AdamW", "FusedAdam")):
        yield Decision(f"{theirs}.name", kind, "the optimizer is Adam")


def _schedule(options: ForeignOptions, role: str, ours: str) -> Found:
    theirs = f"{role}.megatron_cfg.scheduler"
    style = options.take(f"{theirs}.lr_decay_style", "constant")
    if style in SCHEDULES:
        yield RecipeLine(f"{ours}.schedule", style, (f"{theirs}.lr_decay_style",))
    else:
        advice = f"{ours}.schedule is one of {', '.join(SCHEDULES)}"
        yield Decision(f"{theirs}.lr_decay_style", style, advice)
    if style != "constant":
        # Megatron's own constant schedule never falls to min_lr.
        table = {f"{role}.megatron_cfg.optimizer.min_lr": (f"{ours}.min_lr", 5e-7)}
        yield from translate_renamed(options, table)
        iters = options.take(f"{theirs}.lr_decay_iters", None)
        if iters is not None:
            yield Decision(f"{theirs}.lr_decay_iters", iters, "a schedule ends with run.steps")
    yield from translate_renamed(
        options, {f"{theirs}.lr_warmup_iters": (f"{ours}.warmup_steps", 13)}
    )


OTHER_LOOPS = {
    "rm": "reward models are served, not trained (docs/rewards.md)",
    "distillation": "algorithm.advantage=distillation with teacher.path (docs/algorithms.md)",
    "eval": "`mcore-rl eval` with eval.*",
}
"""Groups of options of other training loops, and what there is instead."""


def translate_nemo_rl(options: ForeignOptions) -> Translation:
    """Return the options of a recipe that does what NeMo-RL does with `options`.

    Raises ValueError naming the training loop if it is none of GRPO, PPO, SFT and DPO.
    """
    for loop, instead in OTHER_LOOPS.items():
        if any(name.startswith(f"{loop}.") for name in options.given):
            raise ValueError(
                f"the options have a group `{loop}`: configurations with `grpo`, `ppo`, `sft` or"
                f" `dpo` are translated; see {instead}"
            )
    if is_tuning(options):
        return account(options, _tune(options), reason_for_tuning, loop_of(options))
    return account(options, _translate(options), reason_of)


def _tune(options: ForeignOptions) -> Found:
    yield from translate_keeping(options)
    yield from translate_model(options)
    yield from translate_layout(options, "policy", "parallel")
    yield from translate_micro_batches(options)
    yield from translate_optimizer(options, "policy", "train.optimizer")
    yield from translate_training(options)
    yield from translate_tuning(options)


def _translate(options: ForeignOptions) -> Found:
    yield from translate_run(options)
    yield from translate_model(options)
    yield from translate_layout(options, "policy", "parallel")
    yield from translate_batches(options, "policy", "train")
    yield from translate_micro_batches(options)
    yield from translate_optimizer(options, "policy", "train.optimizer")
    yield from translate_data(options)
    yield from translate_engines(options)
    yield from translate_sampling(options)
    yield from translate_advantage(options)
    yield from translate_loss(options)
    yield from translate_reward(options)
    yield from translate_training(options)
    if is_ppo(options):
        yield from translate_critic(options)
        yield from translate_layout(options, "value", "critic.parallel")
        yield from translate_batches(options, "value", "critic")
        yield from translate_optimizer(options, "value", "critic.optimizer")

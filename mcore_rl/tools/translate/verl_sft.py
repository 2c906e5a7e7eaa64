"""Converts verl's fine-tuning on answers (sft_trainer_engine.yaml) into a recipe for sft.

Its groups `engine`, `optim` and `model` are those of the policy in verl's RL training.
"""

from typing import Any

from mcore_rl.tools.translate.hydra import SFT_CONFIG
from mcore_rl.tools.translate.translation import (
    Decision,
    ForeignOptions,
    Found,
    RecipeLine,
    hold_longest,
    list_differing,
    longest_prefix,
    translate_renamed,
)
from mcore_rl.tools.translate.tuning import (
    LAST_ANSWER,
    MESSAGES,
    NO_EVALUATION,
    NO_SAMPLING,
    translate_passes,
)
from mcore_rl.tools.translate.verl_run import translate_resume, translate_trackers
from mcore_rl.tools.translate.verl_shared import ACTOR, MODEL, home_of, is_megatron
from mcore_rl.tools.translate.verl_training import (
    data_parallel,
    layout_of,
    translate_model,
    translate_optimizer,
    translate_overrides,
)
from mcore_rl.tools.translate.verl_unneeded import reason_of

OF_RL = {"engine": f"{ACTOR}.megatron", "optim": f"{ACTOR}.optim", "model": MODEL}
"""Groups of the fine-tuning, and the groups of RL training that have the same options."""
REASONS = {
    "data.val_": NO_EVALUATION,
    "trainer.test_freq": NO_EVALUATION,
    "model.mtp": "read with mtp.enable only",
    "data.pad_mode": "sequences are packed without padding",
    "data.balance_dp_token": "micro-batches are always balanced",
    "data.ignore_input_ids_mismatch": "a conversation is one text, by the whole template",
    "data.num_workers": "all rows are read before the first step",
    "data.micro_batch_size_per_gpu": "read without use_dynamic_bsz only",
    "data.max_token_len_per_gpu": "read with use_dynamic_bsz only",
    "data.custom_cls": "read with custom_cls.path only",
    "checkpoint": "a checkpoint has everything that a run continues from",
    "trainer.profile_interval": "profile.*",
    "engine": "it is how Megatron ranks always run here",
    "optim": "Megatron's optimizer takes the steps",
    "model": "Megatron trains",
    "actor_rollout_ref": NO_SAMPLING,
}
"""Beginnings of options that fine-tuning does without, and why."""
TEMPLATE = "change the template in model.path"
DIFFERING: dict[str, tuple[Any, str]] = {
    "data.messages_key": ("messages", MESSAGES),
    "data.tools_key": ("tools", "write the tools into the system's message"),
    "data.enable_thinking_key": ("enable_thinking", TEMPLATE),
    "data.enable_thinking_default": ("none", TEMPLATE),
    "data.apply_chat_template_kwargs": ({}, TEMPLATE),
    "data.train_max_samples": (-1, "cut the file: all of its conversations are used"),
    "data.custom_cls.path": (None, "write its rows to a file (docs/data.md)"),
    "trainer.default_hdfs_dir": (None, "checkpoints go to run.dir, which may be a mount"),
}
SIZES_OF_AUTOMODEL = {"tp": "tp_size", "pp": "pp_size", "cp": "cp_size", "ep": "ep_size"}


def is_sft(options: ForeignOptions) -> bool:
    """Return whether verl trains on given answers."""
    own = any(name.startswith(("engine.", "optim.")) for name in options.given)
    return options.config_name == SFT_CONFIG or own


def reason_for_sft(name: str) -> str | None:
    """Return why fine-tuning does without an option, or None."""
    group, _, rest = name.partition(".")
    if group in OF_RL and (reason := reason_of(f"{OF_RL[group]}.{rest}")) is not None:
        return reason
    return longest_prefix(REASONS, name) or reason_of(name)


def translate_sft(options: ForeignOptions) -> Found:
    """Yield the options of a recipe for `mcore-rl sft`."""
    yield from _run(options)
    yield from translate_model(options, "model")
    yield from _layout(options)
    yield from translate_optimizer(options, "optim", "train.optimizer", 1e-3)
    yield from _conversations(options)
    yield from list_differing(options, DIFFERING)


def _run(options: ForeignOptions) -> Found:
    names = ("trainer.project_name", "trainer.experiment_name")
    project, name = options.take(names[0], "gsm8k-sft"), options.take(names[1], "test")
    folder = options.take("trainer.default_local_dir", f"checkpoints/{project}/{name}")
    yield RecipeLine("run.dir", folder, ("trainer.default_local_dir", *names))
    yield from translate_renamed(options, {"trainer.seed": ("run.seed", 1)})
    saves: Any = options.take("trainer.save_freq", None) or -1
    if isinstance(saves, str):
        yield Decision("trainer.save_freq", saves, "set checkpoint.every_steps to such a pass")
    else:
        yield RecipeLine("checkpoint.every_steps", max(saves, 0), ("trainer.save_freq",))
    kept = options.take("trainer.max_ckpt_to_keep", None)
    if kept is not None:
        yield RecipeLine("checkpoint.keep", kept, ("trainer.max_ckpt_to_keep",))
    elif saves != -1:
        advice = "all checkpoints are kept there, here the newest: set checkpoint.keep"
        yield Decision("trainer.max_ckpt_to_keep", None, advice)
    yield from translate_resume(options)
    yield from translate_trackers(options, "gsm8k-sft")


def _layout(options: ForeignOptions) -> Found:
    if is_megatron(options):
        yield from layout_of(options, "engine", "parallel", "model")
        yield from translate_overrides(options, "engine", "train")
        return
    kind = options.take("engine", "fsdp")
    sizes = {"cp": "ulysses_sequence_parallel_size"}
    if kind == "automodel":
        sizes = SIZES_OF_AUTOMODEL
    found = {ours: options.take(f"engine.{theirs}", 1) for ours, theirs in sizes.items()}
    ranks = found.get("tp", 1) * found.get("pp", 1) * found["cp"]
    yield data_parallel(options, "parallel", ranks)
    for ours, size in found.items():
        if size != 1:
            yield RecipeLine(f"parallel.{ours}", size, (f"engine.{sizes[ours]}",))
    advice = "Megatron trains here, and data-parallel ranks do not share weights and gradients: try"
    yield Decision("engine", kind, f"{advice} parallel.tp, pp and ep")
    again = ("model.enable_gradient_checkpointing", "engine.activation_checkpointing")
    switch = again[1] if kind == "automodel" else again[0]
    if options.take(switch, kind != "automodel"):
        yield RecipeLine("train.recompute", "full", (switch,))


def _conversations(options: ForeignOptions) -> Found:
    files = [home_of(file) for file in options.take_list("data.train_files")]
    yield RecipeLine("sft.data", files, ("data.train_files",))
    size = options.take("data.train_batch_size", 256)
    yield RecipeLine("sft.batch_size", size, ("data.train_batch_size",))
    longest = options.take("data.max_length", 1024)
    yield RecipeLine("sft.max_len", longest, ("data.max_length",))
    cut = options.take("data.truncation", "error")
    advice = "longer conversations are dropped and counted, neither cut nor refused"
    yield Decision("data.truncation", cut, advice)
    yield Decision("answers before the last one", None, LAST_ANSWER)
    yield from _micro_batches(options, longest)
    steps = options.take("trainer.total_training_steps", None)
    if steps is not None:
        yield RecipeLine("run.steps", steps, ("trainer.total_training_steps",))
        return
    sources = ("trainer.total_epochs", "data.train_files")
    yield from translate_passes(options.take(sources[0], 4), files, size, sources)


def _micro_batches(options: ForeignOptions, longest: int) -> Found:
    ours = "train.max_tokens_per_microbatch"
    if not options.take("data.use_dynamic_bsz", True):
        source = "data.micro_batch_size_per_gpu"
        yield RecipeLine(ours, options.take(source, 4) * longest, (source, "data.max_length"))
        return
    on_megatron = is_megatron(options)
    cp = "context_parallel_size" if on_megatron else "ulysses_sequence_parallel_size"
    source = "data.max_token_len_per_gpu"
    tokens = options.take(source, 8192) * options.take(f"engine.{cp}", 1)
    yield from hold_longest(ours, tokens, longest, (source, "data.use_dynamic_bsz"))

"""Converts NeMo-RL's fine-tuning on answers and on pairs into recipes for sft and dpo.

Model, layout, micro-batches and optimizer are those of its GRPO.
"""

from typing import Any

from mcore_rl.tools.translate.nemo_policy import loop_of, total_len
from mcore_rl.tools.translate.nemo_unneeded import reason_of
from mcore_rl.tools.translate.translation import (
    Decision,
    ForeignOptions,
    Found,
    RecipeLine,
    list_differing,
)
from mcore_rl.tools.translate.tuning import (
    LAST_ANSWER,
    MESSAGES,
    NO_EVALUATION,
    NO_SAMPLING,
)

PAIRS = "pairs have the columns `prompt`, `chosen` and `rejected` (docs/algorithms.md)"
REASONS = {
    "sft.val_": NO_EVALUATION,
    "dpo.val_": "read with dpo.held_out only, and before the first step as well",
    "data.validation": NO_EVALUATION,
    "data.shuffle": "data are always shuffled",
    "data.add_": "the chat template is always applied, and decides",
    "data.default": "the columns have fixed names (docs/recipes.md)",
    "policy.generation": NO_SAMPLING,
    "policy.logprob_": NO_SAMPLING,
    "policy.refit_": NO_SAMPLING,
    "env": NO_SAMPLING,
    "dpo.gt_reward_scale": "read by losses of graded pairs only",
    "dpo.sft_average_log_probs": "read with dpo.sft_loss_weight only",
}
"""Beginnings of options that only fine-tuning does without, and why."""
OF_DATA: dict[str, tuple[Any, str]] = {
    "data.use_multiple_dataloader": (False, "all files are read as one"),
    "data.num_prompts_per_dataloader": (None, "all files are read as one"),
    "data.custom_dataloader": (None, "rows are drawn in a random order, each once in a pass"),
    "data.dataset_name": (None, "give files"),
    "data.prompt_file": (None, "write whole messages"),
    "data.default.prompt_file": (None, "write whole messages"),
    "data.default.system_prompt_file": (None, "write whole messages"),
}
TOOLS = "write the tools into the system's message"
LOSSES = ("dpo", "ipo")
DIFFERING: dict[str, dict[str, tuple[Any, str]]] = {
    "sft": {
        "data.chat_key": ("messages", MESSAGES),
        "data.tool_key": (None, TOOLS),
        "data.system_key": (None, "write the system's message into `messages`"),
        "data.system_prompt": (None, "write the system's message into `messages`"),
        "data.train.tool_key": (None, TOOLS),
    },
    "dpo": {
        "dpo.preference_average_log_probs": (
            False,
            "algorithm.preference.loss=simpo compares means over tokens, without a reference",
        ),
        "dpo.preference_loss_weight": (
            1,
            "the loss of pairs has weight 1: divide algorithm.preference.nll_coef by this",
        ),
    },
}
"""Options without counterpart by loop, their defaults, and what there is instead."""


def is_tuning(options: ForeignOptions) -> bool:
    """Return whether the configuration is that of SFT or DPO."""
    return loop_of(options) in DIFFERING


def reason_for_tuning(name: str) -> str | None:
    """Return why fine-tuning does without an option, or None."""
    own = next((why for prefix, why in REASONS.items() if name.startswith(prefix)), None)
    return own or reason_of(name)


def translate_tuning(options: ForeignOptions) -> Found:
    """Yield steps, batch, data and loss of SFT or DPO."""
    loop = loop_of(options)
    yield from _steps(options, loop)
    yield from _data(options, loop)
    yield from list_differing(options, DIFFERING[loop])
    if loop == "dpo":
        yield from _pairs_loss(options)
    else:
        is_last = options.take("sft.only_unmask_final", False)
        if not is_last:
            yield Decision("sft.only_unmask_final", is_last, LAST_ANSWER)


def _steps(options: ForeignOptions, loop: str) -> Found:
    steps = f"{loop}.max_num_steps"
    yield RecipeLine("run.steps", options.take(steps, 60), (steps,))
    epochs = options.take(f"{loop}.max_num_epochs", 1)
    advice = "a number of steps alone ends the run: lower run.steps if these passes are fewer"
    yield Decision(f"{loop}.max_num_epochs", epochs, advice)
    size = options.take("policy.train_global_batch_size", 32)
    yield RecipeLine(f"{loop}.batch_size", size, ("policy.train_global_batch_size",))
    yield RecipeLine(f"{loop}.max_len", total_len(options), ("policy.max_total_sequence_length",))
    longest = options.take("data.max_input_seq_length", total_len(options))
    if longest != total_len(options):
        advice = f"{loop}.max_len bounds what is dropped, and counts the whole sequence"
        yield Decision("data.max_input_seq_length", longest, advice)


def _data(options: ForeignOptions, loop: str) -> Found:
    """Yield the files that have a path; sets that have a name are left to the user."""
    format_of = {"sft": MESSAGES, "dpo": PAIRS}[loop]
    sets = {"data.train": f"{loop}.data"}
    if loop == "dpo":
        sets["data.validation"] = "dpo.held_out"
    for theirs, ours in sets.items():
        names = (f"{theirs}.data_path", f"data.{theirs.removeprefix('data.')[:5]}_data_path")
        paths = {name: options.take(name, None) for name in names}
        given = {name: path for name, path in paths.items() if path}
        yield RecipeLine(ours, list(given.values()), tuple(given) or names[:1])
        several: Any = options.take(theirs, None)
        if several:
            yield Decision(theirs, several, f"give their files as {ours}: {format_of}")
        for name, value in options.below(f"{theirs}.", but=("seed", "data_path")).items():
            yield Decision(f"{theirs}.{name}", value, format_of)
        if given and ours == "dpo.held_out":
            every = options.take("dpo.val_period", 25)
            yield RecipeLine("eval.every_steps", max(every, 0), ("dpo.val_period",))
    yield from list_differing(options, OF_DATA)


def _pairs_loss(options: ForeignOptions) -> Found:
    group = "algorithm.preference"
    name = "dpo.preference_loss"
    kind = options.take(name, "dpo")
    if kind in LOSSES:
        yield RecipeLine(f"{group}.loss", kind, (name,))
    else:
        yield Decision(name, kind, f"{group}.loss is one of docs/algorithms.md")
    beta = "dpo.reference_policy_kl_penalty"
    yield RecipeLine(f"{group}.beta", options.take(beta, 0.05), (beta,))
    weight = options.take("dpo.sft_loss_weight", 0)
    if not weight:
        return
    yield RecipeLine(f"{group}.nll_coef", weight, ("dpo.sft_loss_weight",))
    if not options.take("dpo.sft_average_log_probs", False):
        advice = (
            f"the chosen answers' loss is a mean over tokens, not a sum: raise {group}.nll_coef"
        )
        yield Decision("dpo.sft_average_log_probs", False, advice)

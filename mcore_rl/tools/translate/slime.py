"""Converts options of slime 0.3.1, Megatron and SGLang into a recipe.

Data, sampling, rewards and the run itself are converted here.
"""

from collections.abc import Mapping
from typing import Any

from mcore_rl.tools.translate.slime_run import OF_THE_RUN, translate_run
from mcore_rl.tools.translate.slime_sft import is_sft, reason_for_sft, translate_sft
from mcore_rl.tools.translate.slime_speculation import translate_mtp_loss, translate_speculation
from mcore_rl.tools.translate.slime_training import (
    translate_algorithm,
    translate_critic,
    translate_engines,
    translate_layout,
    translate_model,
    translate_optimizer,
    translate_step,
)
from mcore_rl.tools.translate.slime_unneeded import reason_of
from mcore_rl.tools.translate.translation import (
    Decision,
    ForeignOptions,
    Found,
    RecipeLine,
    Translation,
    account,
    list_differing,
    translate_flags,
    translate_renamed,
)

REWARDS = {
    "deepscaler": "math",
    "dapo": "math",
    "math": "math",
    "gpqa": "multiple_choice",
}
"""Rewards of slime, and the file under recipes/rewards/ that judges the same answers."""
UNEQUAL_REWARDS = (
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback",
)
ROLLOUTS = {
    "slime.rollout.sglang_rollout.generate_rollout": "",
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async": "async",
}
OWN_ENVIRONMENT = "write it as an environment or a program of its own (docs/agents.md)"
OWN_TOOLS = "tools come from agents.environment, for all prompts alike (docs/agents.md)"
OWN_REWARD = "write it as a reward, reward.path, or for whole batches (docs/rewards.md)"
GREEDY = "held-out answers are greedy; those of eval.samples are drawn with rollout.top_k"
ENGINES_RUN = "a recipe starts its own engines"
WITHOUT_COUNTERPART: Mapping[str, tuple[Any, str]] = {
    **OF_THE_RUN,
    "--tool-key": ("tools", OWN_TOOLS),
    "--eval-tool-key": (None, OWN_TOOLS),
    "--disable-rollout-global-dataset": (False, "set data.train: prompts come from files"),
    "--data-source-path": (
        "slime.rollout.data_source.RolloutDataSourceWithBuffer",
        "write its rows to a file (docs/data.md)",
    ),
    "--custom-generate-function-path": (None, OWN_ENVIRONMENT),
    "--eval-function-path": (None, OWN_ENVIRONMENT),
    "--eval-config": (None, "set eval.data, a list of files"),
    "--eval-top-k": (None, GREEDY),
    "--eval-max-prompt-len": (None, "held-out prompts have data.max_prompt_len, too"),
    "--eval-max-context-len": (None, "held-out answers have the lengths of training"),
    "--eval-min-new-tokens": (None, "held-out answers may be as short as they are"),
    "--eval-reward-key": (None, "eval.correct_part names the number of the reward that counts"),
    "--rollout-stop": (None, "a response ends with its stop token; put it into model.path"),
    "--rollout-stop-token-ids": (
        None,
        "list them in generation_config.json of model.path, as eos_token_id",
    ),
    "--partial-rollout": (
        False,
        "rollout.mode=async with rollout.partial=continue goes on with unfinished responses",
    ),
    "--buffer-filter-path": (None, "rollout.mode=async with rollout.stale chooses among samples"),
    "--rollout-sample-filter-path": (None, "rollout.dynamic_sampling leaves out equal rewards"),
    "--rollout-sample-hook-path": (None, OWN_ENVIRONMENT),
    "--rollout-all-samples-process-path": (None, OWN_ENVIRONMENT),
    "--rollout-data-postprocess-path": (None, OWN_ENVIRONMENT),
    "--custom-convert-samples-to-train-data-path": (None, OWN_ENVIRONMENT),
    "--custom-reward-post-process-path": (None, OWN_REWARD),
    "--custom-rm-path": (None, OWN_REWARD),
    "--reward-key": (None, "a reward's number `score` is trained on (docs/rewards.md)"),
    "--group-rm": (False, OWN_REWARD),
    "--rm-url": (None, "ask it in a reward of your own, reward.path, or set reward_model.url"),
    "--update-weights-interval": (1, "weights are synced before each step: rollout.max_staleness"),
    "--rollout-external-engine-addrs": (None, ENGINES_RUN),
    "--prefill-num-servers": (None, "an engine prefills and decodes in one server"),
    "--sglang-config": (None, "all engines are alike: rollout.engines, tp and rollout.sglang"),
    "--sglang-router-ip": (None, ENGINES_RUN),
    "--debug-rollout-only": (False, "`mcore-rl eval` samples without training"),
    "--debug-train-only": (False, "`mcore-rl sft` and `mcore-rl dpo` train without engines"),
    "--load-debug-rollout-data": (None, "samples are always drawn from engines"),
    "--load-forge-rollout-data": (None, "samples are always drawn from engines"),
}


def translate_data(options: ForeignOptions) -> Found:
    train = options.take_list("--prompt-data")
    yield RecipeLine("data.train", train, ("--prompt-data",))
    yield from _translate_columns(options)
    yield from translate_renamed(options, {"--rollout-shuffle": ("data.shuffle", False)})
    longest = options.take("--rollout-max-prompt-len", None)
    context = options.take("--rollout-max-context-len", None)
    answer = options.take("--rollout-max-response-len", None)
    if longest is not None:
        yield RecipeLine("data.max_prompt_len", longest, ("--rollout-max-prompt-len",))
    elif context is not None and answer is not None and context > answer:
        sources = ("--rollout-max-context-len", "--rollout-max-response-len")
        yield RecipeLine("data.max_prompt_len", context - answer, sources)
    else:
        advice = "there it has no bound, here longer prompts are dropped: set data.max_prompt_len"
        names = "--rollout-max-prompt-len, --rollout-max-context-len"
        yield Decision(names, context, advice)
    if answer is not None:
        yield RecipeLine("rollout.max_response_len", answer, ("--rollout-max-response-len",))
    else:
        yield Decision("--rollout-max-response-len", None, "set rollout.max_response_len")
    yield from _translate_held_out(options)


KEYS = {
    "--input-key": ("prompt", "input", "prompt"),
    "--label-key": ("answer", "label", "label"),
    "--metadata-key": ("extra_info", "metadata", "metadata"),
}
"""Option that names a column -> (name in data.columns, default of slime, default of the preset)."""


def _translate_columns(options: ForeignOptions) -> Found:
    """Yield the names of columns; training and held-out files have the same ones here."""
    yield RecipeLine("data.columns.preset", "slime")
    for theirs, (ours, default, of_preset) in KEYS.items():
        name = options.take(theirs, default)
        if name != of_preset:
            yield RecipeLine(f"data.columns.{ours}", name, (theirs,))
        of_eval = theirs.replace("--", "--eval-")
        held_out = options.take(of_eval, None)
        if held_out not in (None, name):
            advice = f"held-out files have the columns of training: name theirs {name}, too"
            yield Decision(of_eval, held_out, advice)
    if not options.take("--label-key", ""):
        yield Decision("--label-key", None, "each row needs an answer: set data.columns.answer")
    kinds: Any = options.take("--multimodal-keys", {})
    for kind, name in kinds.items() if isinstance(kinds, dict) else ():
        if kind in ("image", "video"):
            yield RecipeLine(f"data.columns.{kind}s", name, ("--multimodal-keys",))
        else:
            advice = "prompts have images and videos (docs/vision.md)"
            yield Decision("--multimodal-keys", {kind: name}, advice)
    if not isinstance(kinds, dict):
        yield Decision("--multimodal-keys", kinds, "set data.columns.images and videos")


def _translate_held_out(options: ForeignOptions) -> Found:
    """Yield the held-out files, which are given as pairs of a name and a path."""
    words = options.take_list("--eval-prompt-data")
    files = words[1::2] if len(words) > 1 else words
    # slime cuts a file by a suffix in brackets.
    plain = [file.split("@[")[0] for file in files]
    if len(words) > 1:
        sets = [{"name": n, "path": f} for n, f in zip(words[::2], plain, strict=False)]
        yield RecipeLine("eval.sets", sets, ("--eval-prompt-data",))
    else:
        yield RecipeLine("eval.data", plain, ("--eval-prompt-data",))
    for file in set(files) - set(plain):
        yield Decision("--eval-prompt-data", file, "cut the file, or set eval.max_prompts")
    every = options.take("--eval-interval", None)
    yield RecipeLine("eval.every_steps", every or 0, ("--eval-interval",))
    number = options.take("--n-samples-per-eval-prompt", 1)
    if number > 1:
        yield RecipeLine("eval.pass_k", number, ("--n-samples-per-eval-prompt",))
    given = {name: options.take(f"--eval-{name}", None) for name in ("temperature", "top-p")}
    sampled = {name: value for name, value in given.items() if value}
    if sampled:
        yield RecipeLine("eval.samples", number, ("--n-samples-per-eval-prompt",))
    for name, value in sampled.items():
        yield RecipeLine(f"eval.{name.replace('-', '_')}", value, (f"--eval-{name}",))
    yield from translate_renamed(
        options, {"--eval-max-response-len": ("eval.max_response_len", None)}
    )


def translate_sampling(options: ForeignOptions) -> Found:
    table: dict[str, tuple[str, Any]] = {
        "--n-samples-per-prompt": ("rollout.samples_per_prompt", 1),
        "--rollout-temperature": ("rollout.temperature", None),
        "--rollout-top-p": ("rollout.top_p", None),
        "--rollout-top-k": ("rollout.top_k", None),
    }
    yield from translate_renamed(options, table)
    path = options.take("--rollout-function-path", next(iter(ROLLOUTS)))
    mode = ROLLOUTS.get(path, "")
    sources = ("--rollout-function-path",) if mode else ()
    mode = mode or ("one_step_off" if options.config_name == "train_async.py" else "sync")
    if options.take("--colocate", False) and mode != "sync":
        advice = "engines on the trainer's GPUs take turns with it: rollout.mode is sync"
        yield Decision("--rollout-function-path, --colocate", path, advice)
    else:
        yield RecipeLine("rollout.mode", mode, sources)
    if path not in ROLLOUTS:
        yield Decision("--rollout-function-path", path, OWN_ENVIRONMENT)
    yield from _dynamic(options)


def _dynamic(options: ForeignOptions) -> Found:
    kept = options.take("--dynamic-sampling-filter-path", None)
    drawn = options.take("--over-sampling-batch-size", None)
    prompts = options.take("--rollout-batch-size", None)
    if kept in UNEQUAL_REWARDS:
        yield RecipeLine("rollout.dynamic_sampling", True, ("--dynamic-sampling-filter-path",))
        if drawn and prompts and drawn > prompts:
            sources = ("--over-sampling-batch-size", "--rollout-batch-size")
            yield RecipeLine("rollout.oversampling", drawn / prompts, sources)
        elif drawn and not prompts:
            yield Decision("--over-sampling-batch-size", drawn, "set rollout.oversampling")
    elif kept is not None:
        advice = "rollout.dynamic_sampling leaves out groups of equal rewards, and no others"
        yield Decision("--dynamic-sampling-filter-path", kept, advice)
    if kept not in UNEQUAL_REWARDS and drawn and drawn != prompts:
        advice = "rollout.mode=async goes on without waiting for the last responses"
        yield Decision("--over-sampling-batch-size", drawn, advice)


def translate_reward(options: ForeignOptions) -> Found:
    kind = options.take("--rm-type", None)
    plain = kind.removeprefix("boxed_") if isinstance(kind, str) else None
    if plain in REWARDS:
        path = f"recipes/rewards/{REWARDS[plain]}.py"
        yield RecipeLine("reward.path", path, ("--rm-type",))
    else:
        advice = "set reward.path, such as recipes/rewards/math.py (docs/rewards.md)"
        yield Decision("--rm-type", kind, advice)
    yield from list_differing(options, WITHOUT_COUNTERPART)


def translate_slime(options: ForeignOptions) -> Translation:
    """Return the options of a recipe that does what slime does with `options`."""
    if is_sft(options):
        return account(options, translate_sft(options), reason_for_sft, "sft")
    return account(options, _translate(options), reason_of)


def _translate(options: ForeignOptions) -> Found:
    yield from translate_run(options)
    yield from _steps(options)
    yield from translate_model(options)
    yield from translate_layout(options)
    yield from translate_step(options)
    yield from translate_optimizer(options)
    yield from translate_data(options)
    yield from translate_engines(options)
    yield from translate_mtp_loss(options)
    yield from translate_speculation(options)
    yield from translate_sampling(options)
    yield from translate_algorithm(options)
    yield from translate_critic(options)
    yield from translate_reward(options)
    yield from translate_flags(options, reason_of)


def _steps(options: ForeignOptions) -> Found:
    steps = options.take("--num-rollout", None)
    epochs = options.take("--num-epoch", None)
    if steps is not None:
        yield RecipeLine("run.steps", steps, ("--num-rollout",))
    elif epochs is not None:
        yield RecipeLine("run.epochs", float(epochs), ("--num-epoch",))

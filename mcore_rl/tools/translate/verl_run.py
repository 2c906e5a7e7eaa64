"""Converts the run itself of verl 0.9: steps, saves, evaluations, folder and trackers."""

from mcore_rl.tools.translate.translation import Decision, ForeignOptions, Found, RecipeLine
from mcore_rl.tools.translate.tuning import count_rows
from mcore_rl.tools.translate.verl_modes import translate_samples
from mcore_rl.tools.translate.verl_shared import home_of, is_fully_async, take_prompts

TRACKERS = {"tensorboard": "log.tensorboard", "console": "log.console"}
PROJECTS = ("wandb", "swanlab", "trackio", "clearml")
"""Trackers whose project is log.<name>_project."""


def translate_run(options: ForeignOptions) -> Found:
    """Yield steps, saves, evaluations, folder and trackers."""
    name = options.take("trainer.experiment_name", "gsm8k")
    folder = options.take("trainer.default_local_dir", f"runs/{name}")
    yield RecipeLine("run.dir", folder, ("trainer.default_local_dir", "trainer.experiment_name"))
    yield from _steps(options)
    saves = options.take("trainer.save_freq", -1)
    yield RecipeLine("checkpoint.every_steps", max(saves, 0), ("trainer.save_freq",))
    kept = options.take("trainer.max_actor_ckpt_to_keep", None)
    if kept is not None:
        yield RecipeLine("checkpoint.keep", kept, ("trainer.max_actor_ckpt_to_keep",))
    elif saves > 0:
        advice = "all checkpoints are kept there, here the newest: set checkpoint.keep"
        yield Decision("trainer.max_actor_ckpt_to_keep", None, advice)
    every = int(options.take("trainer.test_freq", -1))
    yield RecipeLine("eval.every_steps", max(every, 0), ("trainer.test_freq",))
    yield from translate_resume(options)
    yield from translate_trackers(options, "verl_examples")


def translate_resume(options: ForeignOptions) -> Found:
    """Yield whether a run continues, and from where."""
    resume = options.take("trainer.resume_mode", "auto")
    if resume == "disable":
        yield RecipeLine("run.resume", False, ("trainer.resume_mode",))
    elif resume != "auto":
        path = options.take("trainer.resume_from_path", None)
        advice = "a run continues from its own folder: convert the checkpoint to HuggingFace format"
        names = "trainer.resume_mode, trainer.resume_from_path"
        yield Decision(names, path or resume, f"{advice} and set model.path")


def _steps(options: ForeignOptions) -> Found:
    total = options.take("trainer.total_training_steps", None)
    if total is not None:
        yield RecipeLine("run.steps", total, ("trainer.total_training_steps",))
        return
    if is_fully_async(options):
        yield from translate_samples(options)
        return
    epochs = options.take("trainer.total_epochs", 30)
    rows = count_rows([home_of(file) for file in options.take_list("data.train_files")])
    if rows is not None:
        prompts, _ = take_prompts(options)
        sources = ("trainer.total_epochs", "data.train_files")
        yield RecipeLine("run.steps", max(epochs * (rows // prompts), 1), sources)
    else:
        yield RecipeLine("run.epochs", float(epochs), ("trainer.total_epochs",))


def translate_trackers(options: ForeignOptions, default: str) -> Found:
    """Yield the trackers; `default` is the project if none is named."""
    loggers = options.take_list("trainer.logger", ["console", "wandb"])
    for logger, ours in TRACKERS.items():
        if logger not in loggers:
            yield RecipeLine(ours, False, ("trainer.logger",))
    project = options.take("trainer.project_name", default)
    sources = ("trainer.project_name", "trainer.logger")
    for logger in PROJECTS:
        if logger in loggers:
            yield RecipeLine(f"log.{logger}_project", project, sources)
    for logger in set(loggers) - {*TRACKERS, *PROJECTS}:
        advice = "see docs/monitoring.md#trackers; all numbers are in metrics.jsonl"
        yield Decision("trainer.logger", logger, advice)

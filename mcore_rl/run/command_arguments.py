"""Arguments of the commands that train, evaluate, plan, serve and report; imports nothing heavy."""

import argparse
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mcore_rl.checks.inputs import (
    check_has_environment,
    check_planned,
    find_missing,
    list_input_checks,
    refuse_missing,
)
from mcore_rl.config import Config
from mcore_rl.config.recipe import find_base
from mcore_rl.config.tree import with_settings
from mcore_rl.process.command_line import CommandParser
from mcore_rl.process.gc_pause import without_collector
from mcore_rl.process.log_files import keep_output_lasting
from mcore_rl.process.relaunch import run_in_child
from mcore_rl.process.signals import watch_for_stop_requests
from mcore_rl.run.settings import (
    make_debug_settings,
    read_recipe,
    take_settings,
    with_inputs,
)

Forks = Callable[[], AbstractContextManager[None]]
"""Within its block, processes of one kind are forked from a process that has their imports."""
Merge = Callable[[Path, Path, Path], object]
"""See run.serving.Merge."""
TRAINING = ("sft", "dpo", "train")
"""Commands whose controller starts again where it is lost."""
ENGINE_ACTIONS = {
    "list": "show the engines of a run under way",
    "add": "start one more engine, where the run's Ray has room",
    "drain": "take an engine out, once its requests have ended",
}


@dataclass(frozen=True)
class ForkServers:
    """Starts the two processes from which a run on one machine without CUDA forks its others."""

    workers: Forks
    engines: Forks


def add_recipe_arguments(
    command: argparse.ArgumentParser, name: str, forks: ForkServers, *, has_engines: bool
) -> None:
    """Add recipe and overrides to the command `name`; `has_engines`: the command starts SGLang."""
    take_settings(command)
    run = partial(_run_recipe, command=name, forks=forks, has_engines=has_engines)
    command.set_defaults(run=run, command=name)


def _run_recipe(
    args: argparse.Namespace, command: str, forks: ForkServers, has_engines: bool
) -> None:
    keep_output_lasting()
    watch_for_stop_requests()
    recipe, overrides = read_recipe(args.settings)
    if not recipe.rehearse:
        refuse_missing(list_input_checks(recipe, command))
    may_fork = args.is_program and not recipe.run.debug
    if may_fork and command in TRAINING and recipe.run.recovery.is_used:
        recipe = _go_on_in_child(recipe)
    with ExitStack() as open_forks:
        if recipe.cluster.address is None:
            open_forks.enter_context(forks.workers())
            if has_engines:
                open_forks.enter_context(forks.engines())
        config = with_inputs(recipe, overrides, command)
        with without_collector():  # Ray is imported here, which --help need not wait for
            from mcore_rl.run.commands import COMMANDS
        if config.run.debug:
            config = with_settings(config, make_debug_settings(config.served_models))
        COMMANDS[command](config)


def _go_on_in_child(recipe: Config) -> Config:
    """Return the recipe in a child process, and in another one if that is lost.

    The other one must not start over, so it resumes whatever the recipe says.
    """
    takes_over = run_in_child(recipe.run.recovery.limit_restarts(0))
    if not takes_over or recipe.run.resume:
        return recipe
    return with_settings(recipe, {"run.resume": True})


def add_plan_arguments(command: argparse.ArgumentParser) -> None:
    """Add the settings, --detail and --json."""
    take_settings(command)
    command.add_argument(
        "--detail", action="store_true", help="tables of all ranks and of a weight sync, too"
    )
    command.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    command.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> None:
    recipe, overrides = read_recipe(args.settings)
    check_planned(recipe.algorithm, recipe.model.path)
    missing = [] if recipe.rehearse else find_missing(list_input_checks(recipe, "train"))
    [name] = [s.removeprefix("recipe=") for s in args.settings if s.startswith("recipe=")]
    base = find_base(name, overrides)
    with without_collector():
        from mcore_rl.planning.bundles import RunSize
        from mcore_rl.planning.plan import PlanOutput, print_plan  # imports torch

    base_gpus = None if base is None else RunSize.make(base, "train").count_all_gpus()
    config = with_inputs(recipe, overrides, "plan")
    if not print_plan(config, PlanOutput(args.json, args.detail, base_gpus, missing)):
        raise RuntimeError("the recipe does not fit its GPUs")


def add_agent_arguments(command: argparse.ArgumentParser) -> None:
    """Add the subcommand `run`."""
    kinds = command.add_subparsers(required=True, metavar="kind")
    text = "run episodes of a recipe with model.path, and print the conversations"
    run = kinds.add_parser("run", help=text, description=text)
    take_settings(run)
    run.add_argument("--episodes", type=int, default=2, help="one for each of the first prompts")
    run.add_argument("--greedy", action="store_true", help="take the most likely tokens")

    def run_episodes(args: argparse.Namespace) -> None:
        if args.episodes < 1:
            raise ValueError(f"--episodes {args.episodes}: at least 1")
        recipe, overrides = read_recipe(args.settings)
        if not recipe.rehearse:
            check_has_environment(recipe.agents)
            # It samples from the same files as `mcore-rl pairs`.
            refuse_missing(list_input_checks(recipe, "pairs"))
        config = with_inputs(recipe, overrides, "train")
        with without_collector():
            from mcore_rl.run.agent import run_agent

        run_agent(config, args.episodes, greedy=args.greedy)

    run.set_defaults(run=run_episodes)


def add_serve_arguments(command: argparse.ArgumentParser, merge: Merge) -> None:
    """Add the checkpoint and the options of the server.

    merge   merges a Megatron checkpoint into a HuggingFace directory
    """
    command.add_argument(
        "checkpoint", type=Path, help="HuggingFace directory, or a Megatron checkpoint"
    )
    command.add_argument(
        "--source-hf",
        type=Path,
        metavar="DIR",
        help="of a Megatron checkpoint: the model its run began from",
    )
    for name in ("tp", "ep", "pp"):
        command.add_argument(f"--{name}", type=int, default=1, help="size in SGLang (%(default)s)")
    command.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="auto: as in config.json (%(default)s)",
    )
    command.add_argument(
        "--grammar-backend",
        choices=("none", "xgrammar"),
        help="for response_format and forced tools (on a GPU xgrammar)",
    )
    command.add_argument("--kv-cache-len", type=int, default=65536, help="tokens (%(default)s)")
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    command.add_argument("--port", type=int, default=30000, help="(%(default)s)")
    command.add_argument(
        "--key-file",
        type=Path,
        help="file of mode 600 with the key of requests; else none",
    )
    command.add_argument(
        "--log", type=Path, default=Path("serve.log"), help="SGLang's log file (%(default)s)"
    )
    command.add_argument(
        "--ask", default="", metavar="QUESTION", help="ask this once the server is up"
    )
    command.add_argument("--once", action="store_true", help="stop after the answer")
    command.add_argument(
        "--startup-timeout-s", type=float, default=1800.0, metavar="S", help="(%(default)s)"
    )
    _add_beside_model(command)
    command.set_defaults(run=partial(_serve, merge=merge))


def _add_beside_model(command: argparse.ArgumentParser) -> None:
    """Add what is served or run beside the model's weights."""
    command.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code beside the model: of its tokenizer and configuration",
    )
    command.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="adapter in PEFT's format; requests choose it by model=NAME; may be given again",
    )


def _serve(args: argparse.Namespace, merge: Merge) -> None:
    from mcore_rl.rollout.engine_spec import EngineSpec
    from mcore_rl.rollout.served_models import find_dtype
    from mcore_rl.run.serving import (
        find_model,
        make_serving_keys,
        make_slots,
        refuse_code,
        run_server,
    )

    if args.once and not args.ask:
        raise ValueError("--once ends after the answer to a question: give --ask")
    keep_output_lasting()

    model = find_model(args.checkpoint, args.source_hf, merge)
    if not args.trust_remote_code:
        refuse_code(model)
    spec = EngineSpec(
        model_path=str(model),
        log_path=str(args.log),
        dtype=find_dtype(args.dtype, model, "--dtype"),
        tp=args.tp,
        ep=args.ep,
        pp=args.pp,
        kv_cache_len=args.kv_cache_len,
        tokenizer=True,
        trust_remote_code=args.trust_remote_code,
        host=args.host,
        port=args.port,
        keys=make_serving_keys(args.key_file, args.host),
        adapters=make_slots(args.adapter, model, args.pp),
        extra_args=("--grammar-backend", args.grammar_backend) if args.grammar_backend else (),
    )
    run_server(spec, args.ask, args.once, args.startup_timeout_s)


def add_ledger_arguments(command: argparse.ArgumentParser) -> None:
    """Add the folder of a run, and --json."""
    command.add_argument("run_dir", type=Path)
    command.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    command.set_defaults(run=_balance)


def _balance(args: argparse.Namespace) -> None:
    from mcore_rl.logs.ledger.balance import format_balance, read_balance

    balance = read_balance(args.run_dir)
    print(json.dumps(balance.as_json()) if args.json else format_balance(balance))
    if not balance.holds:
        raise RuntimeError(
            f"the books of {args.run_dir} do not balance: {balance.num_imbalances} imbalances"
        )


def add_engines_arguments(command: argparse.ArgumentParser) -> None:
    """Add what to do, the folder of a run, and for `drain` an engine's number."""
    actions = command.add_subparsers(required=True, metavar="action", parser_class=CommandParser)
    for do, text in ENGINE_ACTIONS.items():
        action = actions.add_parser(do, help=text, description=text)
        action.add_argument("run_dir", type=Path, help="folder of a run of `mcore-rl train`")
        if do == "drain":
            action.add_argument("engine", type=int, help="its number, as `list` shows it")
        action.add_argument(
            "--timeout-s", type=float, default=3600.0, metavar="S", help="(%(default)s)"
        )
        action.set_defaults(run=_request_of_engines, do=do)


def _request_of_engines(args: argparse.Namespace) -> None:
    from mcore_rl.process.run_requests import send_request

    words = {"do": args.do} | ({"engine": args.engine} if args.do == "drain" else {})
    print(send_request(args.run_dir, words, args.timeout_s))


def add_report_arguments(command: argparse.ArgumentParser) -> None:
    """Add the folder of a run."""
    command.add_argument("run_dir", type=Path)
    command.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> None:
    from mcore_rl.logs.run_report import make_report

    make_report(args.run_dir)

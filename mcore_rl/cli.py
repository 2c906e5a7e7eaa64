"""Runs the mcore-rl command: takes a recipe's name and overrides, and fills a run folder."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import launch.cli
from mcore_rl import __version__
from mcore_rl.config.recipe import list_recipes
from mcore_rl.cpu.engine_forks import engine_forks
from mcore_rl.cpu.worker_forks import worker_forks
from mcore_rl.process.command_line import parse_arguments
from mcore_rl.process.cores import check_threads
from mcore_rl.process.disk import explain_refusal, is_refused, report_any_full_disk
from mcore_rl.process.errors import describe_error
from mcore_rl.process.folders import keep_home_usable, keep_sockets_short
from mcore_rl.process.gc_pause import without_collector
from mcore_rl.process.log_files import keep_output_lasting
from mcore_rl.process.network import bypass_proxies
from mcore_rl.process.redaction import redact, remember_environment
from mcore_rl.process.safe_path import keep_path_safe
from mcore_rl.process.signals import (
    EXIT_STATUS,
    StoppedEarlyError,
    keep_interrupts,
    watch_for_stop_requests,
)
from mcore_rl.run.agent_command import add_arguments as add_agent_arguments
from mcore_rl.run.settings import load_settings, read_recipe, with_inputs
from mcore_rl.services.sandbox.command import add_arguments as add_sandbox_arguments
from mcore_rl.services.search.command import add_arguments as add_search_arguments
from mcore_rl.tools.completion import answer_shell
from mcore_rl.tools.options import add_arguments as add_options_arguments
from mcore_rl.tools.translate.command import add_arguments as add_translate_arguments

RECIPE_COMMANDS = {
    "sft": "supervised fine-tuning on sft.data; writes <run.dir>/hf",
    "dpo": "preference optimization (DPO and relatives) on dpo.data; writes <run.dir>/hf",
    "pairs": "preference data from model.path's own responses, for dpo; writes <run.dir>/pairs",
    "train": "reinforcement learning; continues from the newest checkpoint in run.dir",
    "eval": "accuracy of model.path on eval.data",
}
WITH_ENGINES = ("pairs", "train", "eval")
"""Commands that start SGLang."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns its exit status: 0 done, 1 failed, 2 wrong input, 75 saved and stopped on request (the
    same command continues), 130 interrupted.
    """
    parser = make_parser()
    answer_shell(parser)
    args = parse_arguments(parser, argv)
    keep_interrupts()
    remember_environment()
    keep_path_safe()
    os.environ.update(bypass_proxies(os.environ))
    _show_data_counts()
    try:
        with report_any_full_disk():
            keep_sockets_short()
            keep_home_usable()
            check_threads(os.environ)
            args.run(args)
    except ValueError as error:
        return _fail(error, 2)
    except (RuntimeError, TimeoutError) as error:
        return _fail(error, 1)
    except OSError as error:
        if not is_refused(error):
            raise
        return _fail(OSError(explain_refusal(error)), 2)
    except StoppedEarlyError as stopped:
        return _fail(stopped, EXIT_STATUS)
    except KeyboardInterrupt:
        return _fail(KeyboardInterrupt("interrupted"), 130)
    return 0


def _show_data_counts() -> None:
    """Show what the data readers count (prompts, overlong ones) before the run folder has a log."""
    logger = logging.getLogger("mcore_rl.data")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler(sys.stderr))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mcore-rl",
        description="Reinforcement-learning post-training of mixture-of-experts models.",
        epilog=f"recipes:\n{_list_recipes()}\n\n"
        "example: mcore-rl train recipe=tiny_moe_grpo run.steps=10",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, text in RECIPE_COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, epilog=parser.epilog)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        _take_settings(command)
        command.set_defaults(run=_run_recipe, command=name)
    launch.cli.add_commands(commands, load_settings)
    _add_plan(commands)
    _add_simulate(commands)
    _add_serve(commands)
    _add_report(commands)
    _add_data(commands)
    _add_doctor(commands)
    add_options_arguments(commands.add_parser("options", help="all options, or those with a word"))
    add_search_arguments(commands.add_parser("search", help="passages for agents, by an index"))
    add_agent_arguments(commands.add_parser("agent", help="try an environment"), load_settings)
    add_sandbox_arguments(commands.add_parser("sandbox", help="run untrusted code for others"))
    add_translate_arguments(
        commands.add_parser(
            "translate", help="convert verl, slime or NeMo-RL options into a recipe"
        )
    )
    return parser


def _take_settings(command: argparse.ArgumentParser) -> None:
    text = "recipe=<name> and overrides"
    command.add_argument("settings", nargs="*", metavar="key=value", help=text)


def _list_recipes() -> str:
    """A line for each recipe: its name and its headline."""
    headlines = list_recipes()
    width = max(map(len, headlines))
    return "\n".join(f"  {name:{width}}  {line}" for name, line in headlines.items())


def _add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "memory of every rank and traffic of a weight sync, from config.json; starts nothing"
    command = commands.add_parser("plan", help=text, description=text)
    _take_settings(command)
    command.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    command.set_defaults(run=_plan)


def _add_simulate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = (
        "the recipe's steps in predicted time, with its real controller and simulated GPUs;"
        " from config.json alone"
    )
    command = commands.add_parser("simulate", help=text, description=text)
    _take_settings(command)
    command.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    command.add_argument(
        "--out", type=Path, help="folder for picture, trace and numbers (<run.dir>/simulation)"
    )
    command.add_argument(
        "--search",
        type=int,
        nargs="?",
        const=0,
        metavar="GPUS",
        help="compare splits of so many GPUs (the recipe's) between trainer and engines",
    )
    command.set_defaults(run=_simulate)


def _add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "a checkpoint behind SGLang's OpenAI-compatible API, until Ctrl-C"
    command = commands.add_parser("serve", help=text, description=text)
    command.add_argument(
        "checkpoint", type=Path, help="HuggingFace directory, or a Megatron checkpoint"
    )
    command.add_argument(
        "--source-hf",
        type=Path,
        help="for a Megatron checkpoint: the HuggingFace directory that its run began from",
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
        help="honor response_format and forced tool calls (on a GPU xgrammar, otherwise none)",
    )
    command.add_argument("--kv-cache-len", type=int, default=65536, help="tokens (%(default)s)")
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    command.add_argument("--port", type=int, default=30000, help="(%(default)s)")
    command.add_argument(
        "--key-file",
        type=Path,
        help="file of mode 600 with the key that requests must bring; without, they need none",
    )
    command.add_argument(
        "--log", type=Path, default=Path("serve.log"), help="SGLang's log file (%(default)s)"
    )
    command.add_argument(
        "--ask", default="", metavar="QUESTION", help="ask this once the server is up"
    )
    command.add_argument("--once", action="store_true", help="stop after the answer")
    command.add_argument("--startup-timeout-s", type=float, default=1800.0, help="(%(default)s)")
    command.set_defaults(run=_serve)


def _add_report(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "accuracy before and after, samples, reward curve of a run"
    command = commands.add_parser("report", help=text)
    command.add_argument("run_dir", type=Path)
    command.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> None:
    from mcore_rl.logs.run_report import make_report

    make_report(args.run_dir)


def _add_data(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from mcore_rl.tasks.prepare import add_arguments

    add_arguments(commands.add_parser("data", help="prepare prompts: made here, or gsm8k"))


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from mcore_rl.tools.doctor.command import add_arguments, run_doctor

    text = "check this machine, or several, for a run; --gpu: try out its GPU"
    command = commands.add_parser("doctor", help=text)
    add_arguments(command)
    command.set_defaults(run=run_doctor)


def _run_recipe(args: argparse.Namespace) -> None:
    keep_output_lasting()
    watch_for_stop_requests()
    recipe, overrides = read_recipe(args.settings)
    with ExitStack() as forks:
        if recipe.cluster.address is None:
            forks.enter_context(worker_forks())
            if args.command in WITH_ENGINES:
                forks.enter_context(engine_forks())
        config = with_inputs(recipe, overrides, args.command)
        with without_collector():
            from mcore_rl.run import commands  # imports Ray, which --help need not wait for

        from mcore_rl.run.debugging import for_debugger

        getattr(commands, f"run_{args.command}")(for_debugger(config))


def _plan(args: argparse.Namespace) -> None:
    with without_collector():
        from mcore_rl.planning.plan import print_plan  # imports torch

    if not print_plan(load_settings(args.settings, "plan"), as_json=args.json):
        raise RuntimeError("the recipe does not fit its GPUs")


def _simulate(args: argparse.Namespace) -> None:
    with without_collector():
        from mcore_rl.tools.simulate.command import print_simulation  # imports torch

    config = load_settings(args.settings, "plan")
    print_simulation(config, args.out, as_json=args.json, search_gpus=args.search)


def _serve(args: argparse.Namespace) -> None:
    from checkpoint_tools.options import Effort
    from checkpoint_tools.to_hf import to_hf
    from mcore_rl.rollout.engine_spec import EngineSpec
    from mcore_rl.rollout.served_models import find_dtype
    from mcore_rl.run.serving import find_model, run_server, serving_keys

    if args.once and not args.ask:
        raise ValueError("--once ends after the answer to a question: give --ask")
    keep_output_lasting()

    def merge(checkpoint: Path, source_hf: Path, out: Path) -> object:
        effort = Effort(2 << 30, min(8, os.cpu_count() or 1))
        return to_hf(checkpoint, source_hf, out, None, None, 4 << 30, effort)[0]

    model = find_model(args.checkpoint, args.source_hf, merge)
    spec = EngineSpec(
        model_path=str(model),
        log_path=str(args.log),
        dtype=find_dtype(args.dtype, model, "--dtype"),
        tp=args.tp,
        ep=args.ep,
        pp=args.pp,
        kv_cache_len=args.kv_cache_len,
        tokenizer=True,
        host=args.host,
        port=args.port,
        keys=serving_keys(args.key_file, args.host),
        extra_args=("--grammar-backend", args.grammar_backend) if args.grammar_backend else (),
    )
    run_server(spec, args.ask, args.once, args.startup_timeout_s)


def _fail(error: BaseException, status: int) -> int:
    print(redact(f"mcore-rl: {str(error) or describe_error(error)}"), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())

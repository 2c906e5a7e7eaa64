"""`mcore-rl data`: prepares prompts that recipes can train on at once."""

import argparse
from pathlib import Path


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Give the command a subcommand for each data set."""
    kinds = command.add_subparsers(required=True, metavar="kind")
    for name, what, prepare in (
        ("arithmetic", "word problems", _prepare_arithmetic),
        ("countdown", "numbers to reach from given ones", _prepare_countdown),
        ("calculator", "sums for a policy with a calculator", _prepare_calculator),
        ("search", "questions over an encyclopedia to search", _prepare_search),
        ("shapes", "pictures of shapes to count and compare", _prepare_shapes),
        ("zoom", "small pictures for a policy that may look closer", _prepare_zoom),
        ("cartpole", "starts of the game CartPole", _prepare_cartpole),
        ("code", "programming problems with tests", _prepare_code),
    ):
        made = kinds.add_parser(
            name, help=f"{what}, their tokenizer and a tiny model configuration"
        )
        made.add_argument("--out", type=Path, default=Path("data", name))
        made.add_argument("--seed", type=int, default=0)
        made.set_defaults(run=prepare)
    _add_code_files(kinds)
    for name, title, source, prepare in (
        ("gsm8k", "GSM8K", "openai/gsm8k", _prepare_gsm8k),
        ("geometry3k", "Geometry3K", "hiyouga/geometry3k", _prepare_geometry3k),
    ):
        published = kinds.add_parser(name, help=f"{title} as prompt files")
        published.add_argument(
            "--source", default=source, help="local folder, or dataset name on the hub"
        )
        published.add_argument("--out", type=Path, default=Path("data", name))
        published.set_defaults(run=prepare)


def _add_code_files(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    files = kinds.add_parser(
        "code-files", help="problems of APPS, TACO or LiveCodeBench as a prompt file"
    )
    files.add_argument("sources", nargs="+", help="jsonl or parquet files, as they are published")
    files.add_argument("--out", type=Path, required=True, help="the parquet file to write")
    files.add_argument(
        "--language", default="python", help="of the programs to write, such as cpp (%(default)s)"
    )
    files.set_defaults(run=_prepare_code_files)
    overlap = kinds.add_parser(
        "code-overlap", help="held-out problems that occur in a training set; status 1 if any do"
    )
    overlap.add_argument("--train", nargs="+", required=True, help="prompt files")
    overlap.add_argument("--held-out", nargs="+", required=True, help="prompt files")
    overlap.set_defaults(run=_check_overlap)


def _prepare_code_files(args: argparse.Namespace) -> None:
    from mcore_rl.tasks.published import prepare_code_files

    prepare_code_files(args.sources, args.out, args.language)


def _check_overlap(args: argparse.Namespace) -> None:
    from mcore_rl.tasks.code import check_overlap

    check_overlap(args.train, args.held_out)


def _prepare_countdown(args: argparse.Namespace) -> None:
    from mcore_rl.tasks.countdown import prepare_countdown

    prepare_countdown(args.out, seed=args.seed)


def _prepare_calculator(args: argparse.Namespace) -> None:
    from mcore_rl.tasks.calculator import prepare_calculator

    prepare_calculator(args.out, seed=args.seed)


def _prepare_search(args: argparse.Namespace) -> None:
    from mcore_rl.tasks.search_questions import prepare_search

    prepare_search(args.out, seed=args.seed)


def _prepare_shapes(args: argparse.Namespace) -> None:
    from mcore_rl.tasks.shapes import prepare_shapes

    prepare_shapes(args.out, seed=args.seed)


def _prepare_zoom(args: argparse.Namespace) -> None:
    from mcore_rl.tasks.shapes import prepare_zoom

    prepare_zoom(args.out, seed=args.seed)


def _prepare_cartpole(args: argparse.Namespace) -> None:
    from mcore_rl.tasks.cartpole import prepare_cartpole

    prepare_cartpole(args.out, seed=args.seed)


def _prepare_code(args: argparse.Namespace) -> None:
    from mcore_rl.tasks.code import prepare_code

    prepare_code(args.out, seed=args.seed)


def _prepare_arithmetic(args: argparse.Namespace) -> None:
    from mcore_rl.tasks.arithmetic import prepare_arithmetic

    prepare_arithmetic(args.out, seed=args.seed)


def _prepare_gsm8k(args: argparse.Namespace) -> None:
    from mcore_rl.tasks.published import prepare_gsm8k

    prepare_gsm8k(args.source, args.out)


def _prepare_geometry3k(args: argparse.Namespace) -> None:
    from mcore_rl.tasks.published import prepare_geometry3k

    prepare_geometry3k(args.source, args.out)

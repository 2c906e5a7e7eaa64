"""The mcore-rl-ckpt command: a checkpoint of Megatron or HuggingFace in, the other kind or a verdict out."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias

from checkpoint_tools.options import Effort, parse_bytes, show_bytes

DTYPES = ("bfloat16", "float16", "float32")
AS_IN_THE_SOURCE = "of the result; by default as it is in the source"
SOURCES = {
    "checkpoint": "<run.dir>/checkpoints/step_..., or critic_...",
    "source_hf": "a HuggingFace directory",
}
"""What a command that makes a checkpoint reads."""
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Run: TypeAlias = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done or equal, 1 different, 2 wrong or damaged input, 130 interrupted."""
    args = make_parser().parse_args(argv)
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # read when torch is imported: a worker takes one core
    try:
        return args.run(args)
    except (ValueError, OSError) as error:
        return _fail(error, 2)
    except RuntimeError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted; the same command goes on where this one stopped", 130)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mcore-rl-ckpt",
        description="Convert, inspect and verify checkpoints of Megatron (torch_dist) and HuggingFace "
        "(safetensors), with bounded memory, without GPU or process group.",
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_to_hf(commands)
    _add_from_hf(commands)
    _add_to_fp8(commands)
    _add_dequantise(commands)
    _add_upcycle(commands)
    _add_inspect(commands)
    _add_verify(commands)
    command = commands.add_parser(
        "checksums", help="write checksums.json of the files as they are now"
    )
    command.add_argument("checkpoint", type=Path)
    command.set_defaults(run=_checksums)
    return parser


def _add_to_hf(commands: Commands) -> None:
    command = _add_writer(
        commands,
        "to-hf",
        _to_hf,
        "merge a Megatron checkpoint into a HuggingFace directory",
        "checkpoint",
    )
    command.add_argument(
        "--source-hf",
        type=Path,
        required=True,
        help="the directory the run began from: config.json, tokenizer, tensors that were not trained",
    )
    command.add_argument(
        "--optimizer",
        type=Path,
        metavar="FOLDER",
        help="write the optimizer's state, in HuggingFace's names, here",
    )
    command.add_argument("--dtype", choices=DTYPES, help=AS_IN_THE_SOURCE)


def _add_from_hf(commands: Commands) -> None:
    what = "write a HuggingFace model as a Megatron checkpoint that any layout can load"
    command = _add_writer(commands, "from-hf", _from_hf, what)
    command.add_argument(
        "--optimizer",
        type=Path,
        metavar="FOLDER",
        help="take the optimizer's state that to-hf wrote there",
    )
    command.add_argument("--dtype", choices=DTYPES, help=AS_IN_THE_SOURCE)


def _add_to_fp8(commands: Commands) -> None:
    what = (
        "quantise a HuggingFace model: 8-bit values and scales of 128 x 128 blocks, as DeepSeek's"
    )
    _add_writer(commands, "to-fp8", _to_fp8, what)


def _add_dequantise(commands: Commands) -> None:
    what = "write a HuggingFace model that was published in block FP8 or MXFP4 with plain weights"
    command = _add_writer(commands, "dequantise", _dequantise, what)
    command.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="of the result (%(default)s)"
    )


def _add_upcycle(commands: Commands) -> None:
    what = "make a dense HuggingFace model a mixture of experts that computes the same at first"
    command = _add_writer(commands, "upcycle", _upcycle, what)
    command.add_argument("--experts", type=int, default=8, help="in every layer (%(default)s)")
    command.add_argument(
        "--top-k", type=int, default=2, help="of them for each token (%(default)s)"
    )
    command.add_argument(
        "--seed", type=int, default=0, help="of the routers' weights (%(default)s)"
    )


def _add_inspect(commands: Commands) -> None:
    command = commands.add_parser("inspect", help="tensors, shapes, dtypes, bytes, step and layout")
    command.add_argument("checkpoint", type=Path)
    command.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    command.set_defaults(run=_inspect)


def _add_verify(commands: Commands) -> None:
    command = commands.add_parser(
        "verify", help="whether one checkpoint agrees with its checksums, or two with each other"
    )
    command.add_argument("first", type=Path)
    command.add_argument("second", type=Path, nargs="?")
    command.add_argument(
        "--source-hf",
        type=Path,
        help="whose config.json to go by; by default that of the HuggingFace directory",
    )
    command.add_argument(
        "--optimizer", action="store_true", help="compare the optimizer's state as well"
    )
    command.add_argument(
        "--json", action="store_true", help="one JSON object with the checksum of every tensor"
    )
    _add_effort(command)
    command.set_defaults(run=_verify)


def _add_writer(
    commands: Commands, name: str, run: Run, what: str, source: str = "source_hf"
) -> argparse.ArgumentParser:
    """A command that makes a checkpoint: what it reads, where it writes, and what every such one takes."""
    command = commands.add_parser(name, help=what)
    command.add_argument(source, type=Path, help=SOURCES[source])
    command.add_argument("out", type=Path, help="a folder that does not exist yet")
    command.add_argument(
        "--max-file-bytes",
        type=parse_bytes,
        default=4 << 30,
        metavar="SIZE",
        help="about this much per file (4GiB)",
    )
    _add_effort(command)
    command.set_defaults(run=run)
    return command


def _add_effort(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--memory-budget",
        type=parse_bytes,
        default=512 << 20,
        metavar="SIZE",
        help="for the buffers of all workers together (512MiB)",
    )
    command.add_argument(
        "--workers", type=int, default=min(8, os.cpu_count() or 1), help="processes (%(default)s)"
    )


def _effort(args: argparse.Namespace) -> Effort:
    return Effort(args.memory_budget, args.workers)


def _to_hf(args: argparse.Namespace) -> int:
    from checkpoint_tools.to_hf import to_hf

    effort = _effort(args)
    for report in to_hf(
        args.checkpoint,
        args.source_hf,
        args.out,
        args.dtype,
        args.optimizer,
        args.max_file_bytes,
        effort,
    ):
        print(report)
    return 0


def _from_hf(args: argparse.Namespace) -> int:
    from checkpoint_tools.from_hf import from_hf  # imports torch

    effort = _effort(args)
    print(
        from_hf(args.source_hf, args.out, args.dtype, args.optimizer, args.max_file_bytes, effort)
    )
    return 0


def _to_fp8(args: argparse.Namespace) -> int:
    from checkpoint_tools.to_fp8 import to_fp8

    print(to_fp8(args.source_hf, args.out, args.max_file_bytes, _effort(args)))
    return 0


def _dequantise(args: argparse.Namespace) -> int:
    from checkpoint_tools.dequantise import dequantise

    print(dequantise(args.source_hf, args.out, args.dtype, args.max_file_bytes, _effort(args)))
    return 0


def _upcycle(args: argparse.Namespace) -> int:
    from checkpoint_tools.upcycle import upcycle

    numbers = args.experts, args.top_k, args.seed
    print(upcycle(args.source_hf, args.out, *numbers, args.max_file_bytes, _effort(args)))
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from checkpoint_tools.listing import as_json, print_listing
    from checkpoint_tools.opening import open_checkpoint

    checkpoint = open_checkpoint(args.checkpoint)
    if args.json:
        print(json.dumps(as_json(checkpoint)))
    else:
        print_listing(checkpoint)
    return 0


def _verify(args: argparse.Namespace) -> int:
    from checkpoint_tools.verify import SHOWN, verify  # imports torch

    verdict = verify(args.first, args.second, args.source_hf, args.optimizer, _effort(args))
    if args.json:
        sums = {name: f"{crc32:08x}" for name, crc32 in verdict.crc32.items()}
        print(json.dumps({**asdict(verdict), "crc32": sums, "equal": verdict.equal}))
        return 0 if verdict.equal else 1
    for line in (*verdict.notes, *verdict.differences[:SHOWN]):
        print(line)
    if len(verdict.differences) > SHOWN:
        print(f"and {len(verdict.differences) - SHOWN} more")
    outcome = "intact" if args.second is None else "equal"
    if not verdict.equal:
        outcome = f"{len(verdict.differences)} tensors differ"
    print(
        f"{outcome}: {verdict.num_tensors} tensors read, "
        f"{show_bytes(verdict.num_bytes)}, {verdict.checked} checksums agreed; peak memory "
        f"{show_bytes(verdict.peak_bytes)} (Pss of all processes)"
    )
    return 0 if verdict.equal else 1


def _checksums(args: argparse.Namespace) -> int:
    from checkpoint_tools.files import write_checksums
    from checkpoint_tools.opening import open_checkpoint

    print(write_checksums(open_checkpoint(args.checkpoint, use_sums=False)))
    return 0


def _fail(error: object, status: int) -> int:
    print(f"mcore-rl-ckpt: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())

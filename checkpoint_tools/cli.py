"""The mcore-rl-ckpt command: converts a checkpoint to another kind, or checks it."""

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from checkpoint_tools.options import add_effort, parse_bytes, read_effort, show_bytes
from mcore_rl.process.cores import THREADS, check_threads
from mcore_rl.process.disk import explain_refusal, report_any_full_disk
from mcore_rl.weights.megatron_files.integrity import add_remedy

DTYPES = ("bfloat16", "float16", "float32")
DTYPE_HELP = "dtype of the result (as in the source)"
NAME_HELP = "the adapter to write, of several that a run trained in turns"
SOURCES = {
    "checkpoint": "<run.dir>/checkpoints/step_..., or critic_...",
    "source_hf": "a HuggingFace directory",
    "adapter": "a checkpoint of a run with train.lora.rank, or a folder in PEFT's format",
}
"""Help for the source that a converting command reads."""
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Run: TypeAlias = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0 done or equal; 1 different, or the command failed; 2 wrong or damaged input; 130 interrupted
    """
    args = make_parser().parse_args(argv)
    gc.disable()  # a plan is many small objects, none of them in cycles
    try:
        check_threads(os.environ)
        # torch reads this when it is imported; each worker takes one core.
        os.environ.setdefault(THREADS, "1")
        with report_any_full_disk():
            return args.run(args)
    except (ValueError, OSError) as error:
        return _fail(add_remedy(explain_refusal(error)), 2)
    except RuntimeError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted; the same command continues where this one stopped", 130)
    finally:
        gc.enable()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mcore-rl-ckpt",
        description="Convert, inspect and verify checkpoints of Megatron (torch_dist) and "
        "HuggingFace (safetensors) in bounded memory, without a GPU or a process group.",
    )
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    _add_to_hf(commands)
    _add_from_hf(commands)
    _add_merge_lora(commands)
    _add_to_fp8(commands)
    _add_dequantize(commands)
    turned = "bring experts of a Qwen3-VL or Qwen3.5 from transformers' form to the published one"
    _add_writer(commands, "turn-experts", _rewrite, turned)
    alone = "write the language model of a Kimi-K2.5 or Kimi-VL alone, as a DeepSeek-V3"
    _add_writer(commands, "text-only", _rewrite, alone)
    _add_upcycle(commands)
    _add_inspect(commands)
    _add_verify(commands)
    _add_support(commands)
    command = commands.add_parser("checksums", help="rewrite checksums.json for files as they are")
    command.add_argument("checkpoint", type=Path)
    changed = "a file that was changed on purpose; others must agree with their checksums"
    command.add_argument("--changed", action="append", default=[], metavar="FILE", help=changed)
    command.set_defaults(run=_checksums)
    return parser


def _add_to_hf(commands: Commands) -> None:
    summary = "merge a Megatron checkpoint into a HuggingFace directory"
    command = _add_writer(commands, "to-hf", _to_hf, summary, "checkpoint")
    command.add_argument(
        "--source-hf",
        type=Path,
        required=True,
        help="the directory the run began from: config.json, tokenizer, untrained tensors",
    )
    command.add_argument(
        "--optimizer",
        type=Path,
        metavar="FOLDER",
        help="write the optimizer state here, under HuggingFace names",
    )
    command.add_argument("--dtype", choices=DTYPES, help=DTYPE_HELP)
    command.add_argument(
        "--lora",
        action="store_true",
        help="write the factors of a run with train.lora.rank alone, in PEFT's format",
    )
    command.add_argument("--name", default="", help=f"with --lora: {NAME_HELP}")
    command.add_argument(
        "--int4",
        action="store_true",
        help="write in INT4 what --source-hf has in INT4, unchanged groups byte for byte",
    )
    _add_leave_out(command)


def _add_from_hf(commands: Commands) -> None:
    summary = "write a HuggingFace model as a Megatron checkpoint that any layout can load"
    command = _add_writer(commands, "from-hf", _from_hf, summary)
    command.add_argument(
        "--optimizer",
        type=Path,
        metavar="FOLDER",
        help="take the optimizer state that to-hf wrote there",
    )
    command.add_argument("--dtype", choices=DTYPES, help=DTYPE_HELP)


def _add_merge_lora(commands: Commands) -> None:
    summary = "add an adapter's factors to the weights that they were trained on"
    command = _add_writer(commands, "merge-lora", _merge_lora, summary, "adapter")
    command.add_argument("--source-hf", type=Path, required=True, help="the base's directory")
    command.add_argument("--name", default="", help=NAME_HELP)
    command.add_argument("--dtype", choices=DTYPES, help=DTYPE_HELP)


def _add_to_fp8(commands: Commands) -> None:
    summary = "quantize a HuggingFace model to DeepSeek's FP8: scales of 128 x 128 blocks"
    _add_writer(commands, "to-fp8", _rewrite, summary)


def _add_dequantize(commands: Commands) -> None:
    summary = "write a model that was published in block FP8, MXFP4 or INT4 with plain weights"
    former_name = "dequantise"  # kept for one version; without a summary, --help does not list it
    for name, shown in (("dequantize", summary), (former_name, None)):
        command = _add_writer(commands, name, _dequantize, shown)
        command.add_argument(
            "--dtype", choices=DTYPES, default="bfloat16", help="dtype of the result (%(default)s)"
        )


def _add_upcycle(commands: Commands) -> None:
    summary = "turn a dense HuggingFace model into a mixture of experts with the same outputs"
    command = _add_writer(commands, "upcycle", _upcycle, summary)
    command.add_argument("--experts", type=int, default=8, help="experts per layer (%(default)s)")
    command.add_argument("--top-k", type=int, default=2, help="experts per token (%(default)s)")
    command.add_argument(
        "--seed", type=int, default=0, help="seed of the router weights (%(default)s)"
    )


def _add_inspect(commands: Commands) -> None:
    command = commands.add_parser("inspect", help="tensors, shapes, dtypes, bytes, step and layout")
    command.add_argument("checkpoint", type=Path)
    command.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    command.set_defaults(run=_inspect)


def _add_support(commands: Commands) -> None:
    summary = "which parts of a model are known, and what would have to be written"
    command = commands.add_parser("support", help=summary)
    files = "config.json of any model, or its directory, whose tensors are compared as well"
    command.add_argument("model", type=Path, help=files)
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=_support)


def _add_verify(commands: Commands) -> None:
    command = commands.add_parser(
        "verify", help="compare a checkpoint with its checksums, or two checkpoints with each other"
    )
    command.add_argument("first", type=Path)
    command.add_argument("second", type=Path, nargs="?")
    command.add_argument(
        "--source-hf",
        type=Path,
        help="directory whose config.json to use (that of the HuggingFace checkpoint)",
    )
    command.add_argument("--optimizer", action="store_true", help="compare optimizer state too")
    command.add_argument(
        "--json", action="store_true", help="print one JSON object with every tensor's checksum"
    )
    _add_leave_out(command)
    add_effort(command)
    command.set_defaults(run=_verify)


def _add_writer(
    commands: Commands, name: str, run: Run, summary: str | None, source: str = "source_hf"
) -> argparse.ArgumentParser:
    """Add a command that writes a checkpoint, with the arguments that all such commands take."""
    shown: dict[str, Any] = {} if summary is None else {"help": summary}
    command = commands.add_parser(name, **shown)
    command.add_argument(source, type=Path, help=SOURCES[source])
    command.add_argument("out", type=Path, help="a folder that does not exist yet")
    command.add_argument(
        "--max-file-bytes",
        type=parse_bytes,
        default=4 << 30,
        metavar="SIZE",
        help="approximate size of each file (4GiB)",
    )
    add_effort(command)
    command.set_defaults(run=run)
    return command


def _add_leave_out(command: argparse.ArgumentParser) -> None:
    summary = "do without Megatron's tensors whose keys match, such as 'mtp.*'; may be repeated"
    command.add_argument(
        "--leave-out", action="append", default=[], metavar="PATTERN", help=summary
    )


def _to_hf(args: argparse.Namespace) -> int:
    if args.lora:
        return _write_adapter(args)
    if args.name:
        raise ValueError(f"--name {args.name} without --lora: it names an adapter; add --lora")
    from checkpoint_tools.to_hf import to_hf

    reports = to_hf(
        args.checkpoint,
        args.source_hf,
        args.out,
        args.dtype,
        args.optimizer,
        args.max_file_bytes,
        read_effort(args),
        args.leave_out,
        args.int4,
    )
    print(*reports, sep="\n")
    return 0


def _write_adapter(args: argparse.Namespace) -> int:
    from checkpoint_tools.lora import lora_to_peft  # imports torch

    others = {"--optimizer": args.optimizer, "--dtype": args.dtype, "--int4": args.int4}
    unread = [name for name, value in others.items() if value]
    if unread:
        raise ValueError(f"{unread[0]} with --lora: factors are written as they are; leave it out")
    print(lora_to_peft(args.checkpoint, args.source_hf, args.out, args.name))
    return 0


def _merge_lora(args: argparse.Namespace) -> int:
    from checkpoint_tools.lora import merge_lora  # imports torch

    rest = (args.out, args.dtype, args.max_file_bytes, args.name)
    print(merge_lora(args.adapter, args.source_hf, *rest))
    return 0


def _from_hf(args: argparse.Namespace) -> int:
    from checkpoint_tools.from_hf import from_hf  # imports torch

    rest = (args.dtype, args.optimizer, args.max_file_bytes, read_effort(args))
    print(from_hf(args.source_hf, args.out, *rest))
    return 0


def _rewrite(args: argparse.Namespace) -> int:
    from checkpoint_tools.rewrite import take_text, to_fp8, turn_experts

    write = {"to-fp8": to_fp8, "turn-experts": turn_experts, "text-only": take_text}[args.command]
    print(write(args.source_hf, args.out, args.max_file_bytes, read_effort(args)))
    return 0


def _dequantize(args: argparse.Namespace) -> int:
    from checkpoint_tools.rewrite import dequantize

    print(dequantize(args.source_hf, args.out, args.dtype, args.max_file_bytes, read_effort(args)))
    return 0


def _upcycle(args: argparse.Namespace) -> int:
    from checkpoint_tools.upcycle import upcycle

    report = upcycle(
        args.source_hf,
        args.out,
        args.experts,
        args.top_k,
        args.seed,
        args.max_file_bytes,
        read_effort(args),
    )
    print(report)
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from checkpoint_tools.listing import encode_listing, print_listing
    from checkpoint_tools.opening import open_checkpoint

    checkpoint = open_checkpoint(args.checkpoint)
    if args.json:
        print(json.dumps(encode_listing(checkpoint)))
    else:
        print_listing(checkpoint)
    return 0


def _support(args: argparse.Namespace) -> int:
    from checkpoint_tools.support.report import describe_support, encode_support, find_support

    support = find_support(args.model)
    if args.json:
        print(json.dumps(encode_support(support)))
    else:
        print(*describe_support(support), sep="\n")
    return 0 if support.is_supported else 1


def _verify(args: argparse.Namespace) -> int:
    from checkpoint_tools.verify import SHOWN, verify  # imports torch

    verdict = verify(
        args.first, args.second, args.source_hf, args.optimizer, read_effort(args), args.leave_out
    )
    status = 0 if verdict.equal else 1
    if args.json:
        sums = {name: f"{crc32:08x}" for name, crc32 in verdict.crc32.items()}
        print(json.dumps({**asdict(verdict), "crc32": sums, "equal": verdict.equal}))
        return status
    for line in (*verdict.notes, *verdict.differences[:SHOWN]):
        print(line)
    if len(verdict.differences) > SHOWN:
        print(f"and {len(verdict.differences) - SHOWN} more")
    if not verdict.equal:
        outcome = f"{len(verdict.differences)} tensors differ"
    else:
        outcome = "intact" if args.second is None else "equal"
    print(
        f"{outcome}: {verdict.num_tensors} tensors read, {show_bytes(verdict.num_bytes)}, "
        f"{verdict.checked} checksums agreed; peak memory {show_bytes(verdict.peak_bytes)} "
        "(Pss of all processes)"
    )
    return status


def _checksums(args: argparse.Namespace) -> int:
    from checkpoint_tools.files import write_checksums
    from checkpoint_tools.opening import open_checkpoint

    print(write_checksums(open_checkpoint(args.checkpoint, use_sums=False), args.changed))
    return 0


def _fail(error: object, status: int) -> int:
    print(f"mcore-rl-ckpt: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())

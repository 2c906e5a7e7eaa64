"""Arguments of `mcore-rl serve`; imports nothing heavy."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mcore_rl.process.log_files import keep_output_lasting

Merge = Callable[[Path, Path, Path], object]
"""See run.serving.Merge."""


def add_arguments(command: argparse.ArgumentParser, merge: Merge) -> None:
    """Add the checkpoint and the options of the server.

    merge   merges a Megatron checkpoint into a HuggingFace directory
    """
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
    command.set_defaults(run=partial(_serve, merge=merge))


def _serve(args: argparse.Namespace, merge: Merge) -> None:
    from mcore_rl.rollout.engine_spec import EngineSpec
    from mcore_rl.rollout.served_models import find_dtype
    from mcore_rl.run.serving import find_model, make_serving_keys, run_server

    if args.once and not args.ask:
        raise ValueError("--once ends after the answer to a question: give --ask")
    keep_output_lasting()

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
        keys=make_serving_keys(args.key_file, args.host),
        extra_args=("--grammar-backend", args.grammar_backend) if args.grammar_backend else (),
    )
    run_server(spec, args.ask, args.once, args.startup_timeout_s)

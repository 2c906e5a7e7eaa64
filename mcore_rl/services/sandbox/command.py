"""Arguments of `mcore-rl sandbox`; imports nothing heavy."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mcore_rl.process.gc_pause import without_collector

_BUSY_STATUSES = (429, 503, 504)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Give the command its subcommand `serve`."""
    kinds = command.add_subparsers(required=True, metavar="kind")
    text = "run code over HTTP as SandboxFusion does, and keep sessions, until Ctrl-C"
    serve = kinds.add_parser("serve", help=text, description=text)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    serve.add_argument("--port", type=int, default=8080, help="0 takes a free one (%(default)s)")
    serve.add_argument(
        "--key-file",
        type=Path,
        help="file of mode 600 with the key that requests must bring; without, they need none",
    )
    _add_numbers(serve)
    serve.add_argument(
        "--busy-status",
        type=int,
        default=429,
        choices=_BUSY_STATUSES,
        help="HTTP status when the queue is full; verl tries again at 504 only (%(default)s)",
    )
    serve.add_argument(
        "--no-cgroups", action="store_true", help="do without cgroups even where they are writable"
    )
    serve.add_argument(
        "--bubblewrap", action="store_true", help="run programs in bubblewrap as well (bwrap)"
    )
    serve.add_argument("--once", action="store_true", help="start, say what was found, and stop")
    serve.set_defaults(run=_serve)


def _add_numbers(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--workers", type=int, help="executions at a time (one per processor)")
    numbers: Sequence[tuple[str, type, float, str]] = (
        ("max-waiting", int, 256, "requests that may wait for a worker"),
        ("wall-s", float, 10.0, "seconds of a program that asks for no other"),
        ("memory-mib", int, 512, "memory of a program that asks for no other"),
        ("max-memory-mib", int, 8192, "the most memory that a program may ask for"),
        ("processes", int, 32, "processes and threads of a program"),
        ("files-mib", int, 64, "files of a program"),
        ("output-kib", int, 1024, "output of a program"),
        ("max-sessions", int, 16, "sessions at a time"),
        ("idle-s", float, 600.0, "seconds without a call after which a session ends"),
        ("session-s", float, 3600.0, "the longest life of a session, in seconds"),
    )
    for name, kind, default, text in numbers:
        serve.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (%(default)s)")


def _serve(args: argparse.Namespace) -> None:
    with without_collector():
        from mcore_rl.services.sandbox.limits import Limits
        from mcore_rl.services.sandbox.server import serve
        from mcore_rl.services.sandbox.service import SandboxOptions
    limits = Limits(
        wall_s=args.wall_s,
        cpu_s=max(int(args.wall_s) + 1, 1),
        memory_mib=args.memory_mib,
        processes=args.processes,
        files_mib=args.files_mib,
        output_kib=args.output_kib,
    )
    options = SandboxOptions(
        max_waiting=args.max_waiting,
        limits=limits,
        max_memory_mib=args.max_memory_mib,
        max_sessions=args.max_sessions,
        idle_s=args.idle_s,
        session_s=args.session_s,
        use_cgroups=not args.no_cgroups,
        bubblewrap=args.bubblewrap,
    )
    if args.workers is not None:
        options = replace(options, workers=args.workers)
    serve(options, args.host, args.port, args.key_file, args.busy_status, once=args.once)

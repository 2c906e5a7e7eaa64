"""`mcore-rl view`: serves a page that shows runs, until Ctrl-C."""

import argparse
import contextlib
from pathlib import Path


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Give the command its arguments; nothing heavy is imported before it runs."""
    command.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folder; several are compared"
    )
    command.add_argument(
        "--port", type=int, default=0, help="port on this machine; 0: any (%(default)s)"
    )
    command.add_argument(
        "--once", action="store_true", help="read the runs, print how far they are, and end"
    )
    command.set_defaults(run=run_view)


def run_view(args: argparse.Namespace) -> None:
    """Serve until Ctrl-C. Raises ValueError if a folder is no run's, or the port is taken."""
    from mcore_rl.tools.view.server import ViewServer
    from mcore_rl.tools.view.watched_run import open_runs

    runs = open_runs(args.runs)
    if not 0 <= args.port < 1 << 16:
        raise ValueError(f"--port {args.port}: from 0 to 65535")
    if args.once:
        for run in runs:
            while not run.refresh():
                pass
            shown = run.describe()
            print(f"{run.name}: step {shown['last_step']}, {shown['num_samples']} samples")
        return
    try:
        server = ViewServer(runs, args.port)
    except OSError as error:
        raise ValueError(f"--port {args.port}: {error.strerror}; leave it out for any") from None
    print(f"view {', '.join(run.name for run in runs)} at\n  {server.url}", flush=True)
    print("from another machine: ssh -L PORT:127.0.0.1:PORT; Ctrl-C ends", flush=True)
    with contextlib.suppress(KeyboardInterrupt), server:
        server.serve_forever()

"""Runs an `mcore-rl` command once signals, environment, folders and threads are set up.

An error becomes one line on standard error and an exit status.
"""

import logging
import os
import sys
from collections.abc import Callable

from mcore_rl.process.cores import check_threads
from mcore_rl.process.disk import explain_refusal, is_refused, report_any_full_disk
from mcore_rl.process.errors import describe_error
from mcore_rl.process.folders import keep_home_usable, keep_sockets_short
from mcore_rl.process.network import bypass_proxies
from mcore_rl.process.redaction import redact, remember_environment
from mcore_rl.process.safe_path import keep_path_safe
from mcore_rl.process.signals import EXIT_STATUS, StoppedEarlyError, keep_interrupts


def run_command(run: Callable[[], None]) -> int:
    """Run a command; return its exit status.

    0 done, 1 failed, 2 wrong input, 75 saved and stopped on request (the same command continues),
    130 interrupted.
    """
    _set_up()
    try:
        with report_any_full_disk():
            keep_sockets_short()
            keep_home_usable()
            check_threads(os.environ)
            run()
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
    except KeyboardInterrupt as interrupt:
        return _fail(interrupt, 130, "interrupted")
    return 0


def _set_up() -> None:
    keep_interrupts()
    remember_environment()
    keep_path_safe()
    os.environ.update(bypass_proxies(os.environ))
    _show_data_counts()


def _show_data_counts() -> None:
    """Show the counts of data readers on the terminal, since the run folder has no log yet."""
    logger = logging.getLogger("mcore_rl.data")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler(sys.stderr))


def _fail(error: BaseException, status: int, text: str = "") -> int:
    """Print the error, and what the run has noted on it or on the error that led to it."""
    print(redact(f"mcore-rl: {text or str(error) or describe_error(error)}"), file=sys.stderr)
    cause: BaseException | None = error
    while cause is not None and not hasattr(cause, "__notes__"):
        cause = cause.__cause__
    for note in getattr(cause, "__notes__", ()):
        print(redact(note), file=sys.stderr)
    return status

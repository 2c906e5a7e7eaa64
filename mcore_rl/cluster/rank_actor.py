"""Runs one worker object in a Ray actor; a call returns its result or a short traceback.

The output of the process, including the stacks of a crash, goes to a log file of its own.
"""

import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import sysconfig
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

import mcore_rl
from mcore_rl.cluster.breakpoints import answer_in_rank
from mcore_rl.process.cores import THREADS, take_cores
from mcore_rl.process.disk import is_disk_full, iter_chain, name_full_disk
from mcore_rl.process.errors import ProcessLostError, describe_error
from mcore_rl.process.gc_pause import collect_from_here
from mcore_rl.process.log_files import keep_output_lasting, rotate_output
from mcore_rl.process.lost_samples import SamplesLostError
from mcore_rl.process.network import bypass_proxies, find_free_port
from mcore_rl.process.redaction import RedactingFormatter, redact, remember_environment
from mcore_rl.process.safe_path import let_programs_be, put_last

PACKAGE_DIR = str(Path(mcore_rl.__file__).parent)
LIBRARY_DIRS = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
STACK_DUMP_SHARE = 0.95
"""After this share of a call's deadline, the stacks of the process go to the log."""


@dataclass(frozen=True)
class Raised:
    """An exception of a worker's method, returned to the controller as a value.

    causes   summaries of the exceptions that it was raised from
    """

    summary: str
    frames: str
    causes: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotBuilt:
    """The answer to a call if the process has no worker, because Ray restarted it."""


class RankActor:
    """Owns one worker object, such as a model's rank or an engine, in a process of its own.

    This class and not the worker's is the actor, so that output is redirected and deadlines apply
    before the worker's module is imported.
    """

    _has_failed = False
    """Whether this process raised an error that may be of its device."""

    def __init__(
        self,
        log_path: str,
        cores: tuple[int, str | None] | None = None,
        folder: str = "",
        stays: bool = False,
    ) -> None:
        """Redirect the output to `log_path`; take_cores(*cores) where `cores` is given.

        `folder`: the controller's working folder, whose modules the user's code may import.
        `stays`: calls run beside the main thread, where `abort` may end them.
        """
        if stays:  # Ray would end the main thread, and wait for the call.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        let_programs_be()
        if folder:
            put_last(folder)
        if cores:
            take_cores(*cores)
        os.environ.update(bypass_proxies(os.environ))  # this machine's addresses
        self._environment = dict(os.environ)
        gc.disable()  # Until the worker is built: unpickling its arguments imports torch.
        redirect_output(Path(log_path))
        rotate_output()
        answer_in_rank()
        address = ray.get_runtime_context().gcs_address
        print(f"process {os.getpid()} on {socket.gethostname()}, Ray at {address}")
        self._worker: Any = None

    def build(
        self, deadline_s: float, worker_cls: type, *args: object, **kwargs: object
    ) -> Raised | None:
        """Make the worker; its module is imported here, after the output was redirected."""
        return self._answer(deadline_s, self._build, worker_cls, *args, **kwargs)

    def call(self, deadline_s: float, method: str, *args: object, **kwargs: object) -> Any:
        """Return the result of the worker's method, or a Raised if the method raises.

        A SamplesLostError is returned as a value.
        """
        if self._worker is None:
            return NotBuilt()
        return self._answer(deadline_s, getattr(self._worker, method), *args, **kwargs)

    def abort(self) -> None:
        """End what a call waits for in collectives; meant for a thread beside that of the calls.

        The call then raises, and `clear` gets its turn.
        """
        if "torch" not in sys.modules:
            return
        try:
            _import_communicators().abort_communicators()
        except Exception:  # nobody waits for the answer
            traceback.print_exc()

    def clear(self, deadline_s: float) -> bool:
        """Drop the worker, and return whether another one may be built in this process.

        Its device and its memory are then as in a new process. None may be built where one was not
        built to its end. `deadline_s` bounds the wait for what is under way beside calls.
        """
        if self._has_failed or self._worker is None:
            return False
        self._worker.close(deadline_s)
        self._worker = None
        if "torch" not in sys.modules:
            return True
        communicators = _import_communicators()
        communicators.destroy_communicators()
        return communicators.can_meet_again()

    def pid(self) -> int:
        return os.getpid()

    def node_id(self) -> str:
        """Return Ray's id of the node of this process."""
        return ray.get_runtime_context().get_node_id()

    def gpu_ids(self) -> tuple[str, ...]:
        """Return the GPUs that Ray assigned to this process, named as in CUDA_VISIBLE_DEVICES."""
        return sort_gpus([str(gpu) for gpu in ray.get_gpu_ids()])

    def environment(self) -> dict[str, str]:
        """Return the environment variables with which this process started."""
        return self._environment

    def find_meeting_point(self) -> tuple[str, int]:
        """Return (address of this machine, TCP port that was free a moment ago)."""
        return node_address(), find_free_port("")

    def answer_mark(self, path: str, wait_s: float) -> tuple[str, str] | None:
        """Return the content of the file at `path`, and the path of an answer written beside it.

        Returns None if the file is missing after `wait_s` seconds; see shared_folder.py.
        """
        mark = Path(path)
        until_s = time.monotonic() + wait_s
        while not mark.exists():
            if time.monotonic() > until_s:
                return None
            time.sleep(0.1)
        answer = mark.with_name(f"{mark.name}_{socket.gethostname()}_{os.getpid()}")
        answer.write_text("seen")
        return mark.read_text(), str(answer)

    def _build(self, worker_cls: type, *args: object, **kwargs: object) -> None:
        collect_from_here()
        torch, threads = sys.modules.get("torch"), os.environ.get(THREADS)
        if torch is not None and threads:  # A fork's torch did not read the variable.
            torch.set_num_threads(int(threads))
        self._worker = worker_cls(*args, **kwargs)

    def _answer(self, deadline_s: float, function: Any, *args: object, **kwargs: object) -> Any:
        faulthandler.dump_traceback_later(deadline_s * STACK_DUMP_SHARE, file=2)
        try:
            return function(*args, **kwargs)
        except SamplesLostError as lost:
            return lost
        except ProcessLostError as error:
            return Raised(str(error), "")
        except Exception as error:
            # The process boundary: the controller raises the error again and names the rank.
            sys.stderr.write(redact(traceback.format_exc()))
            if is_disk_full(error):
                error = name_full_disk(error)
            summary, *causes = [summarize_error(each) for each in iter_chain(error)]
            if "torch" in sys.modules:
                self._has_failed |= _may_be_of_device([summary, *causes])
            return Raised(summary, shorten_traceback(error), tuple(causes))
        finally:
            faulthandler.cancel_dump_traceback_later()


def node_address() -> str:
    """Return the address at which the run's other processes reach this machine.

    It is loopback if the run has one machine.
    """
    has_other_nodes = sum(node["Alive"] for node in ray.nodes()) > 1
    return ray.util.get_node_ip_address() if has_other_nodes else "127.0.0.1"


def _import_communicators() -> Any:
    """Return the module; only processes that have torch import it."""
    from mcore_rl.device import communicators

    return communicators


def _may_be_of_device(errors: Sequence[str]) -> bool:
    """Return whether errors, which one process raised, may be of its GPU."""
    from mcore_rl.device.failures import Failure, find_failure

    return find_failure(errors) in (Failure.HARDWARE, Failure.DOUBTFUL)


def redirect_output(path: Path) -> None:
    """Append the output of this process and its children, crash stacks included, to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    # Both stay open until the process ends.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    keep_output_lasting()
    faulthandler.enable(file=2)
    remember_environment()
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def summarize_error(error: BaseException) -> str:
    """Return `ValueError: message`, as in the last line of a traceback; it is never empty."""
    if not str(error).strip():
        return describe_error(error)
    return "".join(traceback.format_exception_only(error)).strip()


def shorten_traceback(error: BaseException) -> str:
    """Return the frames of this package and of the user's files, and the innermost frame.

    Frames of Python, of installed libraries and of this module are left out.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    kept = [f for f in frames[:-1] if _is_ours(f.filename)] + frames[-1:]
    return "".join(traceback.format_list(kept)).rstrip()


def _is_ours(filename: str) -> bool:
    return filename.startswith(PACKAGE_DIR) or not filename.startswith((*LIBRARY_DIRS, "<frozen"))


def sort_gpus(names: Sequence[str]) -> tuple[str, ...]:
    """Return GPUs in the order of their numbers; UUIDs and parts of GPUs as they were given.

    Ray assigns those in the order of CUDA_VISIBLE_DEVICES, where neighbors are near one another.
    Their letters say nothing of that.
    """
    return tuple(sorted(names, key=int) if all(map(str.isdigit, names)) else names)

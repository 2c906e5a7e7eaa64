"""Traces every tensor of an engine's loader in the background, to check the link's sampled trace.

connect: trace of examples and samples -> plan -> first sync -> every tensor, bit by bit
                     |                                              |
                     +---------------- the same? <------------------+  if not, the next sync fails

The engine decodes meanwhile. The trace pauses whenever the parameters change. A trace that breaks
off, as without enough memory, proves nothing: it is logged, and syncs go on.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock, Thread

import torch
from torch import Tensor

from mcore_rl.device.gpu_memory import DeviceStream, common_device
from mcore_rl.device.threads import start_thread
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weights.layouts.copy_recorder import HfTensors, LoadWeights
from mcore_rl.weights.layouts.engine_trace import TracedLoad, find_unlike, record_all
from mcore_rl.weights.layouts.loader import LoaderFailedError

_log = logging.getLogger(__name__)

REST_PER_WORK = 3.0
"""Seconds that the trace rests for each second of work, so that the engine can decode."""
_MOST_REST_S = 0.1


class _CancelledError(Exception):
    """The trace's link has ended."""


class FullTrace:
    """Compares a sampled trace with a trace of all tensors, in a thread of its own.

    fault   the difference, or why the loader cannot be traced; None if no fault is known
    done    whether the trace has ended, normally or by an error
    """

    def __init__(
        self,
        owner: str,
        traced: TracedLoad,
        load_weights: LoadWeights,
        hf_tensors: HfTensors,
        tensors: Mapping[str, Tensor],
    ) -> None:
        """Trace for the engine's rank `owner`, whose parameters are `tensors`.

        Their memory may change within `let_parameters_change`.
        """
        self._owner = owner
        self.fault: str | None = None
        self.done = False
        self._traced = traced
        self._load_weights = load_weights
        self._hf_tensors = hf_tensors
        self._tensors = tensors
        self._turn = Lock()
        """Held by the trace while a loader works, and by whoever changes the parameters."""
        self._is_cancelled = False
        self._has_changed = False
        """Whether parameters may have new memory since the loader worked last."""
        self._worked_since_s = 0.0
        self._thread: Thread | None = None

    def start(self) -> None:
        """Start the trace, unless it was started before."""
        if self._thread is None:
            device = common_device(self._tensors.values())
            self._thread = start_thread(device, self._run, name="full trace")

    def cancel(self) -> None:
        """End the trace at the next tensor; it finds no fault afterwards."""
        self._is_cancelled = True

    def wait(self, timeout_s: float) -> bool:
        """Return whether the trace ended within `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self.done

    @contextmanager
    def let_parameters_change(self) -> Iterator[None]:
        """Pause the trace within the block."""
        with self._turn:
            self._has_changed = True
            yield

    def check(self) -> None:
        """Raise TransferError if the trace found a fault."""
        if self.fault is not None:
            raise TransferError(self.fault)

    @torch.no_grad()
    def _run(self) -> None:
        began_s = time.monotonic()
        try:
            fault = self._find_fault()
        except _CancelledError:
            return
        except Exception as error:  # Says nothing about the weights, so syncs must go on.
            if not self._is_cancelled:
                _log.warning(
                    "%s: the trace of all tensors broke off, so only samples show where its weights"
                    " belong: %s: %s. Set sync.trace=full to trace all before the link is made",
                    *(self._owner, type(error).__name__, error),
                )
        else:
            if fault is not None and not self._is_cancelled:
                _log.error("%s: %s", self._owner, fault)
                self.fault = fault
            elif fault is None:
                seconds = time.monotonic() - began_s
                _log.info("all tensors are loaded as their samples: traced in %.1f s", seconds)
        self.done = True

    def _find_fault(self) -> str | None:
        """Return the difference, or why the loader cannot be traced, or None.

        Raises LoaderFailedError for the loader's own error.
        """
        # Loaders may make tensors on the current device, and each thread has its own.
        stream = DeviceStream(common_device(self._tensors.values()))
        try:
            with self._turn, stream.running():
                self._worked_since_s = time.monotonic()
                trace = record_all(self._load_weights, self._hf_tensors, self._tensors, self._rest)
            return find_unlike(self._traced, trace, self._tensors)
        except LoaderFailedError:
            raise
        except ValueError as error:
            return f"the trace of all tensors failed: {error}"

    def _rest(self) -> bool:
        """Let other threads decode and change the parameters, between two tensors of the loader.

        Returns whether the parameters may have changed.
        """
        worked_s = time.monotonic() - self._worked_since_s
        self._turn.release()
        try:
            time.sleep(min(_MOST_REST_S, REST_PER_WORK * worked_s))
        finally:
            self._turn.acquire()
        if self._is_cancelled:
            raise _CancelledError
        has_changed = self._has_changed
        self._has_changed = False
        self._worked_since_s = time.monotonic()
        return has_changed

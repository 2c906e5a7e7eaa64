"""Tells the controller's terminal of ranks that stop at a breakpoint, for which their logs ask."""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

from mcore_rl.cluster.breakpoints import NAMESPACE, open_prefix

_log = logging.getLogger(__name__)
INTERVAL_S = 1.0
_END_S = 5.0


@contextmanager
def naming_breakpoints() -> Iterator[None]:
    """While the block runs, say on stderr and in the log which ranks wait for a debugger, once."""
    is_over = threading.Event()
    thread = threading.Thread(target=_watch, args=(is_over,), name="breakpoints", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(_END_S)


def _watch(is_over: threading.Event) -> None:
    """Look for new breakpoints until `is_over`, or until Ray is gone, which others report."""
    prefix = open_prefix()
    told: set[bytes] = set()
    while not is_over.wait(INTERVAL_S) and ray.is_initialized():
        try:
            for key in _internal_kv_list(prefix, namespace=NAMESPACE):
                text = _internal_kv_get(key, namespace=NAMESPACE)
                if text and key not in told:
                    told.add(key)
                    _log.warning(text.decode())
                    print(f"mcore-rl: {text.decode()}", file=sys.stderr, flush=True)
        except RayError:
            return

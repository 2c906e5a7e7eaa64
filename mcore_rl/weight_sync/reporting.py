"""Runs an action of a rank and leaves a report of its outcome in the link's store."""

import logging
import time
from collections.abc import Callable

import torch

from mcore_rl.process.errors import describe_error
from mcore_rl.weight_sync.link_store import LinkStore
from mcore_rl.weight_sync.transports.transport import TransferError
from mcore_rl.weight_sync.wire import Action, Report

_log = logging.getLogger(__name__)


@torch.no_grad()
def report_outcome(name: str, act: Callable[[], Report]) -> Report:
    """Return the report of `act`; an error is logged and becomes the report of rank `name`."""
    began_s = time.monotonic()
    try:
        return act()
    except TransferError as error:
        _log.exception("weight sync failed on %s", name)
        message = str(error)
        peer_lost = error.peer_lost
    except Exception as error:
        _log.exception("weight sync failed on %s", name)
        message = describe_error(error)
        peer_lost = False
    return Report(name, seconds=time.monotonic() - began_s, error=message, peer_lost=peer_lost)


def publish_report(store: LinkStore, action: Action, rank: int, report: Report) -> bool:
    """Leave `report` for the controller; return False if its store is gone."""
    try:
        store.put_report(action, rank, report)
    except RuntimeError:
        _log.exception("the controller's store is gone; this report is lost: %s", report)
        return False
    return True

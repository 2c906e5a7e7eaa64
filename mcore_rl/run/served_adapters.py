"""Reads which adapters `mcore-rl serve` answers with, and checks them before a server starts."""

from collections.abc import Sequence
from pathlib import Path

from mcore_rl.rollout.adapters import AdapterSlots
from mcore_rl.weight_sync.adapter.serving import SET_UP
from mcore_rl.weights.hf.config import parse_hf_config
from mcore_rl.weights.lora.base import compute_base_sum
from mcore_rl.weights.lora.places import FIRST
from mcore_rl.weights.lora.served import list_served_modules
from mcore_rl.weights.lora.served_files import check_served


def make_slots(given: Sequence[str], model: Path, pp: int) -> AdapterSlots | None:
    """Return the adapters that "<name>=<directory>" name; None: there are none.

    Raises ValueError naming what cannot be served.
    """
    if not given:
        return None
    if pp > 1:
        raise ValueError(f"--adapter with --pp={pp}: engines load adapters with --pp=1 alone")
    folders: dict[str, str] = {}
    for each in given:
        name, equals, folder = each.partition("=")
        if not equals or not name or name in folders:
            raise ValueError(f"--adapter={each}: give NAME=DIR, each name once")
        folders[name] = folder
    base, hf_config = compute_base_sum(model), parse_hf_config(model)
    adapters = [check_served(Path(each), base, hf_config, model) for each in folders.values()]
    names = {key[: -len(FIRST)] for adapter in adapters for key in adapter.shapes}
    rank = max(adapter.rank for adapter in adapters)
    return AdapterSlots(tuple(folders), rank, list_served_modules(names), SET_UP, folders=folders)

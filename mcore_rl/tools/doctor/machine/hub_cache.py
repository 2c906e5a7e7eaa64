"""Checks Hugging Face's cache, from which models and data sets are read, and its offline mode."""

import os
from pathlib import Path

from mcore_rl.tools.doctor.machine.finding import Finding, failed, ok
from mcore_rl.tools.doctor.machine.needs import MachineNeeds

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
TRUE = ("1", "ON", "YES", "TRUE")


def hub_home() -> Path:
    """Return the folder of Hugging Face's caches: $HF_HOME, or huggingface in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or str(Path(cache, "huggingface"))
    return Path(os.path.expandvars(home)).expanduser()


def is_offline() -> bool:
    """Return whether an environment variable keeps huggingface_hub off the network."""
    return any(os.environ.get(name, "").upper() in TRUE for name in OFFLINE)


def check_hub_cache(needs: MachineNeeds) -> list[Finding]:
    """Whether the cache can be read and, unless it is used offline, written."""
    home = hub_home()
    offline = is_offline()
    mode = "offline: only what lies there is used" if offline else "online"
    remedy = "set HF_HOME to a folder that this user can write, the same on every node"
    if not home.is_dir():
        if offline:
            text = f"{home} does not exist, and {' or '.join(OFFLINE)} keeps off the network"
            return [failed("hub cache", text, "set HF_HOME to a cache that has the models")]
        above = next(folder for folder in home.absolute().parents if folder.exists())
        if not os.access(above, os.W_OK):
            return [failed("hub cache", f"{home} cannot be made below {above}", remedy)]
        return [ok("hub cache", f"{home} will be made; {mode}")]
    if not os.access(home, os.R_OK | os.X_OK) or not (offline or os.access(home, os.W_OK)):
        return [failed("hub cache", f"{home} cannot be {'read' if offline else 'written'}", remedy)]
    return [ok("hub cache", f"{home}; {mode}")]

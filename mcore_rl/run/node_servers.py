"""Makes the specification of the servers beside a recipe's collectors, and checks them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mcore_rl.config import Config, SandboxConfig, SearchConfig
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.process.server_keys import SANDBOX_URL, SEARCH_URL
from mcore_rl.services.search.index import read_manifest
from mcore_rl.workers.node_servers import NodeServersSpec

_NOWHERE = "http://127.0.0.1:1"


def node_servers_spec(config: Config) -> NodeServersSpec | None:
    """Return the servers that each collector starts; None if the recipe has none."""
    if not (config.sandbox.is_used or config.search.is_used):
        return None
    search = config.search
    if search.is_used:
        search = replace(search, index=str(Path(search.index).absolute()))
    start_s = config.run.startup_timeout_s
    return NodeServersSpec(config.sandbox, search, RunFolder(config.run.dir).logs, start_s)


def check_node_servers(config: Config) -> None:
    """Raise ValueError if a server of the recipe would not start.

    On a joined cluster, the nodes check an index that this machine lacks when they open it.
    """
    search = config.search
    if search.is_used and (config.cluster.address is None or Path(search.index).exists()):
        try:
            read_manifest(Path(search.index))
        except (ValueError, OSError) as error:
            raise ValueError(f"search.index={search.index}: {error}") from None


def stand_in_urls(sandbox: SandboxConfig, search: SearchConfig) -> Mapping[str, str]:
    """Return placeholder addresses, by variable, so that options can be checked without servers."""
    urls: dict[str, str] = {}
    if sandbox.is_used:
        urls[SANDBOX_URL] = f"{_NOWHERE}/run_code"
    if search.is_used:
        urls[SEARCH_URL] = f"{_NOWHERE}/retrieve"
    return urls

"""Says in a sentence which servers a run starts on each node with engines."""

from mcore_rl.config import SandboxConfig, SearchConfig


def explain_servers(sandbox: SandboxConfig, search: SearchConfig) -> str:
    """Return the servers and what they take besides the ranks' processors; empty: there is none."""
    parts = []
    if sandbox.is_used:
        parts.append(
            f"a sandbox of {sandbox.workers} programs at a time, {sandbox.memory_mib:,} MiB each"
            f" unless they ask for up to {sandbox.max_memory_mib:,}"
        )
    if search.is_used:
        parts.append(f"a search of {search.index} ({search.method}, {search.threads} threads)")
    if not parts:
        return ""
    return f"Servers, on each node with engines: {'; '.join(parts)}."

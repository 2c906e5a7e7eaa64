"""`mcore-rl plan` names the servers that a run starts."""

from mcore_rl.config import SandboxConfig, SearchConfig
from mcore_rl.planning.host_memory import explain_servers


def test_servers_are_named_with_what_they_take() -> None:
    assert explain_servers(SandboxConfig(), SearchConfig()) == ""
    said = explain_servers(SandboxConfig(workers=8), SearchConfig(index="data/i"))
    assert said == (
        "Servers, on each node with engines: a sandbox of 8 programs at a time, 512 MiB each unless"
        " they ask for up to 8,192; a search of data/i (bm25, 4 threads)."
    )

"""A rehearsal has the servers of its recipe in their smallest sizes."""

from pathlib import Path

from mcore_rl.config import SandboxConfig, SearchConfig
from mcore_rl.run.rehearsal_inputs import smallest_servers
from mcore_rl.services.search.index import PassageIndex


def test_a_rehearsal_searches_an_index_of_its_own(tmp_path: Path) -> None:
    sandbox = SandboxConfig(workers=32, max_sessions=8)
    given = SearchConfig("/nowhere", "dense", threads=16)
    for _ in range(2):  # a rehearsal in a folder of an earlier one
        servers = smallest_servers(sandbox, given, tmp_path)
        search = servers["search"]
        assert servers["sandbox"] == SandboxConfig(workers=1, max_sessions=1)
        assert isinstance(search, SearchConfig)
        assert (search.method, search.threads) == ("bm25", 1)
        found = PassageIndex(Path(search.index)).retrieve(["number 42"], 1)[0]
        assert found[0].document["id"] == 41


def test_a_recipe_without_servers_is_rehearsed_without(tmp_path: Path) -> None:
    found = smallest_servers(SandboxConfig(), SearchConfig(), tmp_path)
    assert found == {"sandbox": SandboxConfig(), "search": SearchConfig()}
    assert not list(tmp_path.iterdir())

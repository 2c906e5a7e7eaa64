"""Which servers collectors start, and what is refused before."""

from pathlib import Path

import pytest

from mcore_rl.config import RunConfig, SandboxConfig, SearchConfig
from mcore_rl.config.run import ClusterConfig
from mcore_rl.process.server_keys import SANDBOX_URL, SEARCH_URL
from mcore_rl.run.episodes import check_search, node_servers_spec, stand_in_urls
from mcore_rl.services.search.build import build_index
from mcore_rl.services.search.layout import IndexOptions
from tests.services.search.corpora import write_corpus


@pytest.fixture
def index(tmp_path: Path) -> Path:
    build_index(
        write_corpus(tmp_path / "corpus.jsonl", ["a\nb"]), tmp_path / "i", IndexOptions(), None
    )
    return tmp_path / "i"


def test_a_recipe_without_servers_has_none() -> None:
    sandbox, search = SandboxConfig(), SearchConfig()
    check_search(search, ClusterConfig())
    assert node_servers_spec(RunConfig(), sandbox, search) is None
    assert not stand_in_urls(sandbox, search)


def test_servers_log_into_the_run_folder_and_their_index_has_a_whole_path(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sandbox, search = SandboxConfig(workers=3), SearchConfig(index=index.name)
    check_search(search, ClusterConfig())
    run = RunConfig(dir=str(tmp_path / "run"), startup_timeout_s=33)
    spec = node_servers_spec(run, sandbox, search)
    assert spec is not None
    assert (spec.search.index, spec.sandbox.workers, spec.start_s) == (str(index), 3, 33)
    assert spec.log_dir == tmp_path / "run" / "logs"
    assert stand_in_urls(sandbox, search).keys() == {SANDBOX_URL, SEARCH_URL}


def test_an_index_that_is_not_finished_is_refused(index: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"search.index=.*its corpus .* has 0 bytes"):
        check_search(SearchConfig(index=str(index)), ClusterConfig())
    with pytest.raises(ValueError, match=r"search.index=/nowhere: .*no finished index"):
        check_search(SearchConfig(index="/nowhere"), ClusterConfig())


def test_an_index_may_lie_on_the_nodes_of_a_cluster_alone(index: Path, tmp_path: Path) -> None:
    joined = ClusterConfig(address="127.0.0.1:1")
    check_search(SearchConfig(index="/nowhere"), joined)
    (tmp_path / "corpus.jsonl").write_text("")
    with pytest.raises(ValueError, match="its corpus"):
        check_search(SearchConfig(index=str(index)), joined)

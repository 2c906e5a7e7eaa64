"""Which servers collectors start, and what is refused before."""

from pathlib import Path

import pytest

from mcore_rl.config import Config, RunConfig, SandboxConfig, SearchConfig
from mcore_rl.config.run import ClusterConfig
from mcore_rl.process.server_keys import SANDBOX_URL, SEARCH_URL
from mcore_rl.run.episodes import check_node_servers, node_servers_spec, stand_in_urls
from mcore_rl.services.search.build import build_index
from mcore_rl.services.search.layout import IndexOptions
from tests.services.search.corpora import write_corpus


@pytest.fixture
def index(tmp_path: Path) -> Path:
    build_index(
        write_corpus(tmp_path / "corpus.jsonl", ["a\nb"]), tmp_path / "i", IndexOptions(), None
    )
    return tmp_path / "i"


def make(folder: Path, index: str = "", workers: int = 0, address: str | None = None) -> Config:
    return Config(
        run=RunConfig(dir=str(folder / "run"), startup_timeout_s=33),
        sandbox=SandboxConfig(workers=workers),
        search=SearchConfig(index=index),
        cluster=ClusterConfig(address=address),
    )


def test_a_recipe_without_servers_has_none(tmp_path: Path) -> None:
    config = make(tmp_path)
    check_node_servers(config)
    assert node_servers_spec(config) is None and not stand_in_urls(config.sandbox, config.search)


def test_servers_log_into_the_run_folder_and_their_index_has_a_whole_path(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = make(tmp_path, index.name, workers=3)
    check_node_servers(config)
    spec = node_servers_spec(config)
    assert spec is not None
    assert (spec.search.index, spec.sandbox.workers, spec.start_s) == (str(index), 3, 33)
    assert spec.log_dir == tmp_path / "run" / "logs"
    assert stand_in_urls(config.sandbox, config.search).keys() == {SANDBOX_URL, SEARCH_URL}


def test_an_index_that_is_not_finished_is_refused(index: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"search.index=.*its corpus .* has 0 bytes"):
        check_node_servers(make(tmp_path, str(index)))
    with pytest.raises(ValueError, match=r"search.index=/nowhere: .*no finished index"):
        check_node_servers(make(tmp_path, "/nowhere"))


def test_an_index_may_lie_on_the_nodes_of_a_cluster_alone(index: Path, tmp_path: Path) -> None:
    check_node_servers(make(tmp_path, "/nowhere", address="127.0.0.1:1"))
    (tmp_path / "corpus.jsonl").write_text("")
    with pytest.raises(ValueError, match="its corpus"):
        check_node_servers(make(tmp_path, str(index), address="127.0.0.1:1"))

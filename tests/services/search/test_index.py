"""An index finds what its corpus has, over shards, and refuses what is not whole."""

from pathlib import Path

import pytest

from mcore_rl.services.search.build import build_index
from mcore_rl.services.search.index import PassageIndex, read_options, verify
from mcore_rl.services.search.layout import IndexOptions
from tests.services.search.corpora import random_texts, write_corpus


def made(folder: Path, texts: list[str], shard_len: int) -> Path:
    corpus = write_corpus(folder / "corpus.jsonl", texts)
    build_index(corpus, folder / "index", IndexOptions(shard_len), None)
    return folder / "index"


def test_rows_come_back_as_they_are(tmp_path: Path) -> None:
    texts = random_texts(25)
    index = PassageIndex(made(tmp_path, texts, 10))
    assert (index.name, index.num_passages) == ("bm25", 25)
    queries = [f"title{i}" for i in range(25)]
    for i, hits in enumerate(index.retrieve(queries, 3)):
        assert hits[0].document == {"id": str(i), "contents": texts[i]}
        assert len(hits) == 1 and hits[0].score > 0
    assert index.retrieve(["", "unknown"], 3) == [[], []]
    index.close()


def test_hits_of_all_shards_are_merged_by_score(tmp_path: Path) -> None:
    index = PassageIndex(made(tmp_path, random_texts(60), 7))
    hits = index.retrieve(["w1 w2 w3"], 20)[0]
    scores = [hit.score for hit in hits]
    assert len(hits) == 20 and scores == sorted(scores, reverse=True)
    assert len({hit.document["id"] for hit in hits}) == 20
    assert index.retrieve(["w1 w2 w3"], 5)[0] == hits[:5]


class Backwards:
    """Vectors that find the last passages of the corpus, whatever is asked."""

    def top(self, queries, num):
        return [[(24 - i, 1.0 - i / 100) for i in range(num)] for _ in queries]


def test_words_and_vectors_are_fused(tmp_path: Path) -> None:
    folder = made(tmp_path, random_texts(25), 10)
    dense = PassageIndex(folder, "dense", Backwards()).retrieve(["title3"], 2)[0]
    assert [hit.document["id"] for hit in dense] == ["24", "23"]
    hybrid = PassageIndex(folder, "hybrid", Backwards()).retrieve(["title23"], 3)[0]
    assert hybrid[0].document["id"] == "23" and hybrid[0].score > hybrid[1].score


@pytest.mark.parametrize(
    "name", ["bm25/data.csc.index.npy", "bm25/words.npy", "offsets.npy", "shard.json"]
)
def test_a_changed_file_is_named(tmp_path: Path, name: str) -> None:
    folder = made(tmp_path, random_texts(25), 10)
    verify(folder)
    path = folder / "shard-00001" / name
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"shard-00001/{name}"):
        verify(folder)
    path.write_bytes(data[:-3])
    if name != "shard.json":
        with pytest.raises(ValueError, match=rf"shard-00001/{name} is missing or not what"):
            PassageIndex(folder)


def test_a_changed_corpus_is_named(tmp_path: Path) -> None:
    folder = made(tmp_path, random_texts(25), 10)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(corpus.read_bytes().replace(b"title3", b"title4"))
    with pytest.raises(ValueError, match=r"corpus.jsonl is missing or not what the build"):
        verify(folder)


def test_a_folder_without_an_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no finished index.*mcore-rl search build"):
        read_options(tmp_path)
    assert read_options(made(tmp_path, ["a"], 3)) == IndexOptions(3)

"""A build goes on after it was killed, and refuses what is not its own."""

import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from mcore_rl.process.file_lock import hold_lock
from mcore_rl.services.search.build import build_index
from mcore_rl.services.search.index import PassageIndex, verify
from mcore_rl.services.search.layout import IndexOptions
from tests.services.search.corpora import command, environment, random_texts, write_corpus

SMALL = IndexOptions(shard_len=10)


def files_of(index: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(index)): path.read_bytes()
        for path in sorted(index.rglob("*"))
        if path.is_file() and path.name != "build.lock"
    }


def test_shards_cover_the_corpus(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", random_texts(25))
    seen: list[tuple[int, int]] = []
    count = build_index(
        corpus, tmp_path / "index", SMALL, None, lambda done, total: seen.append((done, total))
    )
    size = corpus.stat().st_size
    assert count == 25 and seen[0] == (0, size) and seen[-1] == (size, size) and len(seen) == 4
    verify(tmp_path / "index")


def test_a_build_that_is_killed_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    """Kill -9 at random moments, until a build ends; the index is that of an unharmed build."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", random_texts(4000))
    words = command("build", "--corpus", str(corpus), "--shard-len", "100", "--out")
    began_s = time.monotonic()
    subprocess.run([*words, str(tmp_path / "whole")], env=environment(), check=True, timeout=120)
    took_s = time.monotonic() - began_s
    rng = random.Random(0)
    num_kills = 0
    while True:
        process = subprocess.Popen([*words, str(tmp_path / "index")], env=environment())
        try:
            # The first time may be the slowest; a machine that became slow gets longer and longer.
            share = rng.uniform(0.3, 0.9) * (1 + num_kills / 10) if num_kills else 0.3
            assert process.wait(took_s * share) == 0
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)
            num_kills += 1
        assert num_kills < 50
    assert num_kills > 0
    assert files_of(tmp_path / "index") == files_of(tmp_path / "whole")
    verify(tmp_path / "index")


def test_a_mended_corpus_keeps_the_shards_before_the_broken_row(tmp_path: Path) -> None:
    texts = random_texts(25)
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    good = corpus.read_bytes()
    corpus.write_bytes(good.replace(b'"id": "17"', b'"idd": "17"'))
    with pytest.raises(ValueError, match=r"corpus.jsonl:18: .* as `id`"):
        build_index(corpus, tmp_path / "index", SMALL, None)
    first = (tmp_path / "index" / "shard-00000").stat().st_mtime_ns
    with pytest.raises(ValueError, match="no finished index"):
        PassageIndex(tmp_path / "index")
    corpus.write_bytes(good)
    assert build_index(corpus, tmp_path / "index", SMALL, None) == 25
    assert (tmp_path / "index" / "shard-00000").stat().st_mtime_ns == first


def test_a_corpus_that_grew_is_finished(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", random_texts(12))
    build_index(corpus, tmp_path / "index", SMALL, None)
    write_corpus(corpus, random_texts(31))
    with pytest.raises(ValueError, match="put the corpus back, or build the index again"):
        PassageIndex(tmp_path / "index")
    assert build_index(corpus, tmp_path / "index", SMALL, None) == 31
    index = PassageIndex(tmp_path / "index")
    assert index.num_passages == 31
    assert [hit.document["id"] for hit in index.retrieve(["title30"], 3)[0]] == ["30"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda corpus: write_corpus(corpus, random_texts(25, seed=9)), "index of another corpus"),
        (lambda corpus: corpus.write_text(""), "no such file, or it is empty"),
        (lambda corpus: corpus.unlink(), "no such file, or it is empty"),
    ],
)
def test_another_corpus_is_refused(tmp_path: Path, change, problem: str) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", random_texts(25))
    build_index(corpus, tmp_path / "index", SMALL, None)
    change(corpus)
    with pytest.raises(ValueError, match=problem):
        build_index(corpus, tmp_path / "index", SMALL, None)


def test_other_options_and_a_second_build_are_refused(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", random_texts(5))
    build_index(corpus, tmp_path / "index", SMALL, None)
    with pytest.raises(ValueError, match="holds an index of other options"):
        build_index(corpus, tmp_path / "index", IndexOptions(11), None)
    with (
        hold_lock(tmp_path / "index" / "build.lock"),
        pytest.raises(ValueError, match="another build writes it"),
    ):
        build_index(corpus, tmp_path / "index", SMALL, None)
    shutil.rmtree(tmp_path / "index")
    assert build_index(corpus, tmp_path / "index", IndexOptions(11), None) == 5

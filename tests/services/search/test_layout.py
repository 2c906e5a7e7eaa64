"""The files of an index say what they are, and whether they are whole."""

import hashlib
import json
from pathlib import Path

import pytest

from mcore_rl.services.search.layout import (
    EncoderOptions,
    IndexOptions,
    compute_digest,
    list_facts,
    sync_file,
    sync_folder,
    write_json,
)


def test_options_are_read_as_they_were_written() -> None:
    for options in (IndexOptions(), IndexOptions(7, EncoderOptions("m", "cls", 9, "q: ", "p: "))):
        assert IndexOptions.from_json(json.loads(json.dumps(options.to_json()))) == options


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: IndexOptions(0), "--shard-len=0"),
        (lambda: EncoderOptions("m", "max"), "--pooling=max"),
        (lambda: EncoderOptions("m", max_len=0), "--max-len=0"),
    ],
)
def test_senseless_options_are_refused(make, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make()


def test_digests_are_of_the_bytes_between(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(range(256)) * 9000)
    whole = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    part = hashlib.blake2b(path.read_bytes()[100:1_500_000], digest_size=16).hexdigest()
    assert compute_digest(path) == whole and compute_digest(path, 100, 1_500_000) == part


def test_all_files_below_a_folder_are_listed(tmp_path: Path) -> None:
    (tmp_path / "bm25").mkdir()
    write_json(tmp_path / "bm25" / "a.json", [1])
    write_json(tmp_path / "shard.json", {})
    sync_file(tmp_path / "shard.json")
    sync_folder(tmp_path)
    facts = list_facts(tmp_path)
    assert list(facts) == ["bm25/a.json"]
    assert facts["bm25/a.json"][0] == (tmp_path / "bm25" / "a.json").stat().st_size

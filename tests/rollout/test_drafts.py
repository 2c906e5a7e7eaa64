"""Drafts of engines that speculate: none repeats another, and passes are counted by version."""

import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.rollout import drafts
from mcore_rl.rollout.drafts import (
    DraftCounter,
    find_compilers,
    measure_drafts,
    move_repeated,
    read_counts,
    sum_counts,
)
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.rollout.speculation import make_speculation
from mcore_rl.types import WeightVersion

OLD, NEW = WeightVersion(3), WeightVersion(4)


def make_mask(parents: list[int]) -> np.ndarray:
    mask_NN = np.eye(len(parents), dtype=np.int64)
    for node, parent in enumerate(parents[1:], 1):
        mask_NN[node] |= mask_NN[parent]
    return mask_NN


@pytest.mark.parametrize(
    ("tokens", "parents", "moved"),
    [
        ([9, 5, 7], [-1, 0, 0], [-1, 0, 0]),
        ([9, 0, 0, 0], [-1, 0, 0, 0], [-1, 0, 1, 2]),
        ([9, 4, 0, 0, 0], [-1, 0, 1, 0, 0], [-1, 0, 1, 0, 3]),
        ([9, 0, 0, 0, 0], [-1, 0, 1, 0, 0], [-1, 0, 1, 2, 3]),
        ([9, 5, 5, 6, 6], [-1, 0, 0, 1, 2], [-1, 0, 1, 1, 2]),
        ([9, 5, 5, 6, 6, 7], [-1, 0, 0, 2, 3, 4], [-1, 0, 1, 2, 3, 4]),
    ],
)
def test_a_draft_that_repeats_another_goes_behind_it(
    tokens: list[int], parents: list[int], moved: list[int]
) -> None:
    mask_NN = make_mask(parents)
    move_repeated(np.array(tokens), mask_NN)
    assert mask_NN.tolist() == make_mask(moved).tolist()
    found = [int(np.flatnonzero(row[:node])[-1]) for node, row in enumerate(mask_NN) if node]
    assert len(set(zip(found, tokens[1:], strict=True))) == len(found)


def test_an_engine_gets_the_options_of_its_drafts(tmp_path: Path) -> None:
    spec = EngineSpec("m", str(tmp_path / "log"), port=1, speculation=make_speculation("ngram", 5))
    flags = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "6"]
    assert spec.arguments()[-len(flags) :] == flags
    plain = EngineSpec("m", str(tmp_path / "log"), port=1, speculation=make_speculation("none", 5))
    assert "--speculative-algorithm" not in plain.arguments()


def test_a_machine_without_compilers_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setattr(drafts.shutil, "which", lambda name: "/bin/x")
    find_compilers()
    assert os.environ["PATH"] == f"/bin:{sysconfig.get_path('scripts')}"
    monkeypatch.setattr(drafts.shutil, "which", lambda name: None if name == "ninja" else "/bin/x")
    with pytest.raises(ValueError, match=r"with ninja and a C.* set rollout.speculate=none"):
        find_compilers()


def test_passes_are_counted_by_version() -> None:
    told = read_counts({"draft_counts": [["3", 10, 4], ["4", 2, 0]]})
    assert told == {OLD: (10, 4), NEW: (2, 0)}
    assert read_counts({}) == {}
    counter = DraftCounter()
    counter.add(told)
    counter.add({NEW: (6, 6)})
    assert counter.take() == {OLD: (10, 4), NEW: (8, 6)}
    assert counter.take() == {}
    assert sum_counts(told, told) == {OLD: (20, 8), NEW: (4, 0)}


def test_the_newest_weights_are_measured() -> None:
    assert measure_drafts({}, 3) == {}
    assert measure_drafts({NEW: (8, 6), OLD: (10, 4)}, 3) == {
        "drafts/version": 4.0,
        "drafts/acceptance": 0.25,
        "drafts/tokens_per_pass": 1.75,
    }

"""Drafts of engines that speculate: none repeats another, and passes are counted by version."""

import os
import sysconfig
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.rollout import drafts
from mcore_rl.rollout.draft_choice import Told, Way
from mcore_rl.rollout.drafts import (
    DraftCounter,
    add_pass,
    find_compilers,
    measure_drafts,
    move_repeated,
    read_counts,
    sum_counts,
)
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.rollout.speculation import make_speculation
from mcore_rl.types import DraftCount, WeightVersion

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
    def list_flags(method: str, when: str) -> list[str]:
        speculation = make_speculation(method, 5, when)
        spec = EngineSpec("m", str(tmp_path / "log"), port=1, speculation=speculation)
        return spec.arguments()

    flags = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "6"]
    assert list_flags("ngram", "always")[-len(flags) :] == flags
    assert list_flags("ngram", "faster")[-1] == "--speculative-adaptive"
    assert "--speculative-algorithm" not in list_flags("none", "faster")
    assert list_flags("mtp", "faster")[-1] == "--speculative-adaptive"
    assert "--speculative-adaptive" not in list_flags("mtp", "always")


def test_a_machine_without_compilers_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setattr(drafts.shutil, "which", lambda name: "/bin/x")
    find_compilers()
    assert os.environ["PATH"] == f"/bin:{sysconfig.get_path('scripts')}"
    monkeypatch.setattr(drafts.shutil, "which", lambda name: None if name == "ninja" else "/bin/x")
    with pytest.raises(ValueError, match=r"with ninja and a C.* set rollout.speculate=none"):
        find_compilers()


def test_passes_are_counted_by_version() -> None:
    told = read_counts({"draft_counts": [["3", 10, 4, 5, 1, 1.5], ["4", 2, 0, 0, 0, 0.0]]})
    assert told == {OLD: DraftCount(10, 4, 5, 1, 1.5), NEW: DraftCount(2, 0)}
    assert read_counts({}) == {}
    counter = DraftCounter()
    counter.add(told)
    counter.add({NEW: DraftCount(6, 6)})
    assert counter.take() == {OLD: told[OLD], NEW: DraftCount(8, 6)}
    assert counter.take() == {}
    doubled = {OLD: DraftCount(20, 8, 10, 2, 3.0), NEW: DraftCount(4, 0)}
    assert sum_counts(told, told) == doubled


def test_a_pass_counts_as_what_it_was() -> None:
    def sum_passes(*passes: tuple[Told, int]) -> DraftCount:
        sums = list(astuple(DraftCount()))
        for told, num_accepted in passes:
            add_pass(sums, told, num_accepted)
        return DraftCount(*sums)

    assert sum_passes((Told(Way.DRAFT, None), 2)) == DraftCount(1, 2)
    assert sum_passes((Told(Way.DRAFT, 1.5), 0), (Told(Way.DRAFT, None), 1)) == DraftCount(
        2, 1, 0, 1, 1.5
    )
    assert sum_passes((Told(Way.KEEP, 0.5), 0)) == DraftCount(0, 0, 1, 1, 0.5)
    assert sum_passes((Told(Way.PLAIN, None), 0)) == DraftCount(plain=1)


def test_the_newest_weights_are_measured() -> None:
    assert measure_drafts({}, 3) == {}
    assert measure_drafts({NEW: DraftCount(8, 6, 24, 2, 2.5), OLD: DraftCount(10, 4)}, 3) == {
        "drafts/version": 4.0,
        "drafts/pass_share": 0.25,
        "drafts/acceptance": 0.25,
        "drafts/tokens_per_pass": 1.75,
        "drafts/gain": 1.25,
    }
    plain = {"drafts/version": 4.0, "drafts/pass_share": 0.0}
    assert measure_drafts({NEW: DraftCount(plain=9)}, 3) == plain

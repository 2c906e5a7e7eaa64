"""Stages are chosen by name, and run in their own order."""

import pytest

from mcore_rl.doctor.stages import STAGES, choose_stages, find_check


def test_all_stages_are_chosen_by_default_and_named_ones_in_their_order() -> None:
    assert choose_stages("") == STAGES
    assert [stage.name for stage in choose_stages("probes, sync")] == ["sync", "probes"]


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--stages=sync,probe: no stage 'probe'; there are sync,"):
        choose_stages("sync,probe")


def test_every_check_is_found_by_its_names() -> None:
    for stage in STAGES:
        assert len({check.name for check in stage.checks}) == len(stage.checks)
        for check in stage.checks:
            assert find_check(stage.name, check.name) is check

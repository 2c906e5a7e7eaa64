"""The log of a simulation accounts for every prompt."""

from mcore_rl.tools.simulate.run import StepLog
from mcore_rl.types import GroupLease, Prompt, StoredSample, VersionSpan, WeightVersion
from mcore_rl.types.scores import Scores


def samples(*prompts: int) -> list[StoredSample]:
    spans = (VersionSpan(0, 1, WeightVersion(0)),)
    return [
        StoredSample(Prompt(p, (1,), (), "", None), i, 1, "stop", spans, False, GroupLease(0, p))
        for p in prompts
        for i in range(2)
    ]


def test_prompts_that_are_lost_trained_twice_or_half_are_named() -> None:
    log = StepLog()
    for step, prompts in ((1, (0, 1)), (2, (2, 3))):
        log.log(step, {"time/step": 1.0})
        log.log_samples(step, samples(*prompts), Scores([]))
    assert log.list_unaccounted({"num_items": 100, "position": 4, "open": []}, 2) == []
    assert log.list_unaccounted({"num_items": 100, "position": 6, "open": [4, 5]}, 2) == []
    assert log.list_unaccounted({"num_items": 100, "position": 6, "open": [4]}, 2) == [5], "lost"
    assert log.list_unaccounted({"num_items": 100, "position": 4, "open": [3]}, 2) == [3], (
        "it would be trained again"
    )
    assert log.list_unaccounted({"num_items": 100, "position": 4, "open": []}, 3) == [0, 1, 2, 3], (
        "half"
    )
    log.go_back(1)
    assert list(log.steps) == [1]
    assert log.list_unaccounted({"num_items": 100, "position": 4, "open": [2, 3]}, 2) == []


def test_epochs_count_each_time() -> None:
    log = StepLog()
    for step, prompts in ((1, (0, 1)), (2, (0, 1))):
        log.log_samples(step, samples(*prompts), Scores([]))
    assert log.list_unaccounted({"num_items": 2, "position": 4, "open": []}, 2) == []
    assert log.list_unaccounted({"num_items": 2, "position": 5, "open": [4]}, 2) == []
    assert log.list_unaccounted({"num_items": 2, "position": 5, "open": []}, 2) == [0]

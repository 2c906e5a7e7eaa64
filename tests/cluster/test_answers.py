"""How deaths and exceptions of ranks are told; test_group has the waiting itself, on real Ray."""

from pathlib import Path

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from mcore_rl.cluster.answers import (
    Rank,
    RankError,
    RankFaultError,
    RankHungError,
    _describe_death,
    _describe_exceptions,
    find_cause_of_death,
    find_death,
    make_error,
)
from mcore_rl.cluster.rank_actor import Raised

RANK = Rank("trainer", 3, Path("/logs/trainer_rank3.log"))


@pytest.mark.parametrize(
    ("report", "cause"),
    [
        ("Worker unexpectedly exits with exit code 7. ...", "exit code 7"),
        ("The actor died because its node has died. Node Id: ab", "its machine left the cluster"),
        (
            "Task was killed due to the node running low on memory.\nMemory on the node"
            " (IP: ...) was 0.95; the node was running low on memory",
            "killed by Ray: the machine is out of memory",
        ),
        (
            "The actor is dead because its worker process has died.",
            "killed, crashed or out of memory",
        ),
    ],
)
def test_ray_reports_are_put_into_a_few_words(report: str, cause: str) -> None:
    assert find_cause_of_death(report) == cause


def test_only_errors_that_tell_of_a_death_are_deaths() -> None:
    """Ray tells by no error of an actor that it has killed one to free memory."""
    killed = OutOfMemoryError("Memory on the node was 0.95.\nRefer to the documentation on how to")
    assert find_death(killed) == "killed by Ray: the machine is out of memory"
    assert find_death(RayActorError(error_msg="exit code 7.")) == "exit code 7"
    assert find_death(RayTaskError("train", "Traceback", ValueError("no"))) is None


def test_a_rank_is_named_with_its_place_once_that_is_known() -> None:
    assert str(RANK) == "rank 3 (trainer, log /logs/trainer_rank3.log)"
    placed = RANK.name_place("dp 1 tp 1")
    assert str(placed) == "rank 3 (trainer, dp 1 tp 1, log /logs/trainer_rank3.log)"
    assert _describe_death(RANK, "killed", "save") == (
        "trainer rank 3 died (killed) during save; log /logs/trainer_rank3.log"
    )
    assert _describe_death(placed, "killed", "save").startswith(
        "trainer rank 3 (dp 1 tp 1) died (killed) during save;"
    )


def test_of_several_exceptions_the_lowest_rank_is_shown_and_the_others_are_named() -> None:
    raised = [
        (Rank("trainer", index, Path("log")), Raised(f"ValueError: on {index}", f"  frame {index}"))
        for index in (2, 0, 1)
    ]
    assert _describe_exceptions(raised).splitlines() == [
        "rank 0 (trainer, log log): ValueError: on 0",
        "  frame 0",
        "also raised on: ranks 1, 2",
    ]
    assert "also" not in _describe_exceptions(raised[:1])


def raise_on_ranks(*errors: str) -> RankError:
    raised = [
        (Rank("trainer", index, Path("log")), Raised(f"RuntimeError: {error}", ""))
        for index, error in enumerate(errors)
    ]
    return make_error("told", raised)


def test_one_program_error_is_enough_to_end_the_run() -> None:
    ecc = "CUDA error: uncorrectable ECC error encountered"
    access = "CUDA error: an illegal memory access was encountered"
    lost = "Connection closed by peer"
    assert type(raise_on_ranks(lost, "shapes differ")) is RankError
    assert type(raise_on_ranks(ecc, "shapes differ")) is RankError
    assert type(raise_on_ranks(lost, lost)) is RankHungError
    fault = raise_on_ranks(lost, ecc, access)
    assert isinstance(fault, RankFaultError) and not fault.is_doubtful
    doubtful = raise_on_ranks(access, lost)
    assert isinstance(doubtful, RankFaultError) and doubtful.is_doubtful

"""The arguments of an agent, and what it says of wrong ones."""

from pathlib import Path

import pytest

from mcore_rl.cluster.node_agent.__main__ import main, parse


def test_arguments_become_a_job() -> None:
    words = "--name b --names a,b --folder /f --topology s0.b --num-cpus 4 -- train recipe=x"
    job = parse([*words.split(), "run.seed=1"])
    assert (job.rank, job.names, job.addresses) == (1, ("a", "b"), ("a", "b"))
    assert (job.folder, job.num_cpus, job.order) == (Path("/f"), 4, "s0.000001")
    assert job.command == ("train", "recipe=x", "run.seed=1")


def test_a_node_that_is_not_of_the_job_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--name", "c", "--names", "a,b", "--folder", "/f", "train"]) == 2
    assert "node c is none of the job's nodes: a, b" in capsys.readouterr().err

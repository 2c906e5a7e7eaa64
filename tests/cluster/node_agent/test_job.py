"""Nodes of a job know their place; an agent reads its arguments."""

from pathlib import Path

import pytest

from mcore_rl.cluster.node_agent.__main__ import main, parse
from mcore_rl.cluster.node_agent.job import Job


def job(rank: int, topology: str = "") -> Job:
    return Job(rank, ("a", "b"), ("a", "b"), Path("/x"), ("train",), topology=topology)


def test_nodes_below_one_switch_are_neighbors() -> None:
    assert sorted([job(0, "s1.a").order, job(1, "s0.b").order]) == ["s0.000001", "s1.000000"]
    assert [job(k, name).order for k, name in ((0, "a"), (1, ""))] == ["000000", "000001"]


def test_a_node_outside_the_job_is_refused() -> None:
    assert (job(1).name, job(1).num_nodes) == ("b", 2)
    with pytest.raises(ValueError, match=r"node 2 of a job of 2 nodes \(a, b\) with 2 addresses"):
        job(2)


def test_arguments_become_a_job() -> None:
    words = "--name b --names a,b --folder /f --topology s0.b --num-cpus 4 -- train recipe=x"
    job = parse([*words.split(), "run.seed=1"])
    assert (job.rank, job.names, job.addresses) == (1, ("a", "b"), ("a", "b"))
    assert (job.folder, job.num_cpus, job.order) == (Path("/f"), 4, "s0.000001")
    assert job.command == ("train", "recipe=x", "run.seed=1")


def test_a_node_that_is_not_of_the_job_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--name", "c", "--names", "a,b", "--folder", "/f", "train"]) == 2
    assert "node c is none of the job's nodes: a, b" in capsys.readouterr().err

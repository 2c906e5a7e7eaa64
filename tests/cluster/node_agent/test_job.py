"""Nodes of a job know their place."""

from pathlib import Path

import pytest

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

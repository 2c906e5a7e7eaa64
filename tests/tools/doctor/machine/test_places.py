"""The place of a node, from options or from SLURM's task."""

import pytest

from mcore_rl.tools.doctor.machine.meeting import NodePlace, read_place

SLURM = {"SLURM_NTASKS": "3", "SLURM_PROCID": "2", "SLURMD_NODENAME": "c7"}


def test_options_win_over_slurm() -> None:
    assert read_place(None, None, "", SLURM) == NodePlace(2, 3, "c7")
    assert read_place(2, 0, "a", SLURM) == NodePlace(0, 2, "a")


@pytest.mark.parametrize(
    ("nodes", "rank", "message"),
    [
        (None, 0, "--nodes is not given and SLURM_NTASKS is not set"),
        (2, None, "--node-rank is not given and SLURM_PROCID is not set"),
        (0, 0, "--nodes=0"),
        (2, 2, "--node-rank=2: nodes are counted from 0 to 1"),
    ],
)
def test_a_place_that_cannot_be_is_refused(nodes, rank, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_place(nodes, rank, "a", {})

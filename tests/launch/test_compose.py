"""Launch files are found, overridden and checked."""

from pathlib import Path

import pytest

from launch.options import SlurmOptions
from launch.targets import list_launches, load_launch


def test_a_file_of_ones_own_builds_on_a_shipped_one(tmp_path: Path) -> None:
    own = tmp_path / "our_cluster.yaml"
    own.write_text("defaults: [slurm, _self_]\npartition: h100\nenvironment: {A: '1'}\n")
    overrides = ["launch.account=ml", "launch.environment.B=two words, é=1"]
    options = load_launch(str(own), overrides)
    assert isinstance(options, SlurmOptions)
    assert (options.partition, options.account, options.time_limit) == ("h100", "ml", "24:00:00")
    assert options.environment == {"A": "1", "B": "two words, é=1"}


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("pbs", [], r"launch=pbs: no file .*; there are .*local, .*slurm"),
        ("slurm", ["launch.partitoin=a"], "launch=slurm: .*partitoin"),
        ("slurm", ["launch.nodes=many"], "launch=slurm: launch.nodes: .*'many'"),
        ("slurm", ["launch.requeues=-1"], "launch.requeues=-1: must be at least 0"),
        ("slurm", ["launch.retries=-1"], "launch.retries=-1: must be at least 0"),
        ("slurm", ["launch.target=pbs"], "target=pbs: expected one of"),
    ],
)
def test_what_is_wrong_is_named(name: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_launch(name, overrides)


def test_every_shipped_launch_file_is_valid() -> None:
    assert {"local", "slurm"} <= set(list_launches())
    for name in list_launches():
        assert name.startswith(load_launch(name, []).target)

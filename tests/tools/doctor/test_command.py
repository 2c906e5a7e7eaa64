"""`mcore-rl doctor`: machine checks by default; wrong input is refused."""

import argparse
from pathlib import Path

import pytest

from mcore_rl.cli import main as mcore_rl
from mcore_rl.tools.doctor.command import add_arguments, main, read_needs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nope"], "--only=nope: no check 'nope'; there are python, "),
        (["--ports", "80,x"], "--ports=80,x: 'x' is no port; give numbers from 1 to 65535"),
        (["run.dir=x"], "run.dir=x: give one recipe=<name>"),
        (["recipe=nope"], "recipe=nope: no file "),
        (["--nodes", "2", "--node-rank", "0"], "--nodes=2: give --rendezvous"),
        (["--rendezvous", "x", "--nodes", "2", "--node-rank", "2"], "--node-rank=2: nodes are"),
    ],
)
def test_wrong_arguments_are_one_line_and_status_2(
    arguments: list[str], message: str, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert mcore_rl(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"mcore-rl doctor: {message}")


def test_without_options_the_machine_is_checked_and_shown_as_a_table(capsys) -> None:
    status = mcore_rl(["doctor", "--only", "python,limits"])
    out = capsys.readouterr().out
    assert out.startswith("ok       python")
    assert status == (1 if "\nfailed" in out else 0)


def test_a_recipe_and_options_say_what_is_checked(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = f"recipe=tiny_moe_grpo model.path=/m run.dir=/r --run-dir {tmp_path} --model /n"
    words += " --ports 8000,6379 --ray-head --interface eth0 --container docker"
    needs = read_needs(parser.parse_args(words.split()), num_nodes=2)
    assert needs.run_dir == tmp_path
    assert [model.path for model in needs.models] == ["/m", "/n"]
    assert needs.ports == (8000, 6379, 8265, 10001, 52365)
    assert (needs.interface, needs.container, needs.num_nodes) == ("eth0", "docker", 2)

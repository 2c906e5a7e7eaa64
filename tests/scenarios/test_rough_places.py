"""Every command in every rough place works on tiny input, or ends with its one clear message."""

import argparse
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from checkpoint_tools.cli import make_parser as make_ckpt_parser
from mcore_rl.cli import make_parser
from tests.support.ordinary_user import open_python
from tests.support.rough_commands import (
    CKPT,
    COMMANDS,
    WALK,
    Command,
    long_commands,
    prepare,
    quick_commands,
    refused_commands,
)
from tests.support.rough_places import PLACES, Start, open_ground

TOGETHER = "together"
WALK_S, COMMAND_S = 300.0, 240.0
RISKY = ("shadows",)
"""Tried alone in each test run, as the user of the tests; all together are tried as another one."""


@pytest.fixture(scope="module")
def given() -> Iterator[Path]:
    """Models, data and a run, which nobody may write to, and only root could."""
    with open_ground() as ground:
        folder = ground / "given (1) größe 模型"
        folder.mkdir()
        prepare(folder)
        closed = (folder, folder / "run")
        for each in closed:
            each.chmod(0o555)
        yield folder
        for each in closed:
            each.chmod(0o755)


@pytest.fixture
def ground() -> Iterator[Path]:
    with open_ground() as folder:
        yield folder


def place(ground: Path, name: str) -> Start:
    """Return a start in one place, or in all together but the one that moves files to /tmp."""
    if os.geteuid() == 0 and not open_python():
        pytest.skip("no Python here that every user may start")
    start = Start(ground)
    for each in PLACES if name == TOGETHER else (name,):
        if name != TOGETHER or each != "long_tmpdir":
            PLACES[each](start)
    return start


def walk(start: Start, commands: Mapping[str, Command]) -> None:
    """Run the commands one after the other, and compare how they end."""
    words = json.dumps({name: command.words for name, command in commands.items()})
    done = start.run(WALK, words, timeout_s=WALK_S)
    assert done.returncode == 0, done.stderr[-3000:]
    ended = json.loads(done.stdout.splitlines()[-1])
    wrong = [
        f"{name}: status {status} instead of {command.status}, or without {command.says!r}:"
        f"\n{text[-2000:]}"
        for name, command in commands.items()
        for status, text in [ended[name]]
        if status != command.status or command.says not in text or "Traceback" in text
    ]
    assert not wrong, "\n".join(wrong)


def check_modes(start: Start) -> None:
    """Whoever wrote a file below the working folder left its permissions to umask."""
    work = start.make_work()
    shadows = {work / f"{name}.py" for name in start.modules}
    wrong = []
    for path in set(work.rglob("*")) - shadows:
        found = path.lstat().st_mode
        most = 0o777 if stat.S_ISDIR(found) else 0o666
        if not stat.S_ISLNK(found) and stat.S_IMODE(found) != most & ~start.umask:
            wrong.append(f"{path.relative_to(work)}: {stat.S_IMODE(found):o}")
    assert not wrong, f"umask {start.umask:o}: {wrong}"


def walk_quickly(given: Path, ground: Path, name: str) -> None:
    start = place(ground, name)
    copied = start.execute(["cp", "-r", f"{given}/run", "own_run"], start.make_work(), 60.0)
    assert copied.returncode == 0, copied.stderr
    start.execute(["chmod", "u+w", "own_run"], start.make_work(), 60.0)
    walk(start, quick_commands(given))
    check_modes(start)


@pytest.mark.parametrize(
    "name", [TOGETHER, *(pytest.param(n, marks=pytest.mark.slow) for n in RISKY)]
)
def test_quick_commands_work_in_a_place(given: Path, ground: Path, name: str) -> None:
    walk_quickly(given, ground, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PLACES if name not in RISKY])
def test_quick_commands_work_in_every_other_place(given: Path, ground: Path, name: str) -> None:
    walk_quickly(given, ground, name)


def test_what_a_user_may_not_use_is_told_in_one_line(given: Path, ground: Path) -> None:
    walk(place(ground, "ordinary_user"), refused_commands(given))


@pytest.mark.e2e
@pytest.mark.slow
def test_a_run_trains_in_all_places_at_once(given: Path, ground: Path) -> None:
    start = place(ground, TOGETHER)
    carry_out(start, "train", long_commands(given)["train"])
    check_modes(start)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [TOGETHER, *PLACES])
def test_long_commands_work_in_every_place(given: Path, ground: Path, name: str) -> None:
    start = place(ground, name)
    for each, command in long_commands(given).items():
        carry_out(start, each, command)
    check_modes(start)


def carry_out(start: Start, name: str, command: Command) -> None:
    """Run a command in a process of its own, as users do."""
    done = start.run(COMMANDS["mcore-rl"], *command.words, timeout_s=COMMAND_S)
    output = f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == 0 and "Traceback" not in output, f"{name}: {output}"


def test_every_command_is_walked() -> None:
    given = Path("given")
    walked = {name.removeprefix(CKPT) for name in quick_commands(given) if name.startswith(CKPT)}
    all_of_them = set(subcommands(make_ckpt_parser()))
    assert walked < all_of_them and len(all_of_them - walked) == 1, "one has its former name, too"
    walked = {name for name in quick_commands(given) if not name.startswith(CKPT)}
    of_data = {name for name in subcommands(make_parser()) if name.startswith("data ")}
    assert walked == {*subcommands(make_parser()), "data"} - of_data
    assert {*long_commands(given), *refused_commands(given)} <= set(quick_commands(given)) | {
        "search"
    }


def subcommands(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the names of commands, of those with commands of their own each of these."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                below = list(subcommands(command))
                yield from (f"{name} {each}" for each in below) if below else (name,)

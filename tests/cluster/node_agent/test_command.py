"""The job's command: its status, and what it is asked."""

import time

from mcore_rl.cluster.node_agent.agent import RunCommand
from mcore_rl.process.signals import EXIT_STATUS


def status_of(command: RunCommand, timeout_s: float = 60.0) -> int:
    until = time.monotonic() + timeout_s
    while (status := command.status()) is None:
        assert time.monotonic() < until
        time.sleep(0.05)
    return status


def test_the_status_is_the_commands() -> None:
    assert status_of(RunCommand(["--version"])) == 0
    assert status_of(RunCommand(["train", "recipe=no_such_recipe"])) == 2


def test_a_command_that_is_ended_has_the_status_of_its_signal() -> None:
    command = RunCommand(["logs", "--follow", "no_such_run"])
    command.end()
    assert status_of(command) == 143


def test_a_request_to_save_that_comes_too_early_is_kept() -> None:
    """The command would die of it until it handles the signal; this one never gets there."""
    command = RunCommand(["train", "recipe=no_such_recipe"])
    command.ask_to_save()
    assert status_of(command) in (2, EXIT_STATUS)

"""Checks that the books of whole runs balance, by the command and by what its proof counts."""

from pathlib import Path

from mcore_rl.cli import main
from mcore_rl.logs.ledger.balance import Balance, count_trained, read_balance


def assert_books_balance(run_dir: Path, num_steps: int) -> Balance:
    """Check that the command finds nothing wrong with a finished run; return what it found."""
    balance = read_balance(run_dir)
    assert balance.holds, balance.imbalances
    assert main(["ledger", str(run_dir)]) == 0
    assert balance.ended == "finished" and balance.last_step == num_steps
    return balance


def assert_same_prompts(first: Path, second: Path) -> None:
    """Check that two runs trained on the same prompts, each as often in each epoch."""
    assert count_trained(first) == count_trained(second)

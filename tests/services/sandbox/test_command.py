"""`mcore-rl sandbox serve` takes its numbers from the command line and refuses wrong ones."""

import pytest

from mcore_rl.cli import main, make_parser
from mcore_rl.services.sandbox import command as sandbox_command


def test_the_command_has_defaults_and_options() -> None:
    args = make_parser().parse_args(["sandbox", "serve", "--workers", "3", "--busy-status", "504"])
    assert (args.workers, args.busy_status, args.host, args.port) == (3, 504, "127.0.0.1", 8080)
    assert (args.max_waiting, args.memory_mib, args.once) == (256, 512, False)
    assert 504 in sandbox_command._BUSY_STATUSES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "give --key-file"),
        (["--workers", "0"], "workers=0"),
        (["--wall-s", "-1"], "wall_s=-1"),
        (["--memory-mib", "9000"], "max_memory_mib=8192"),
        (["--key-file", "/none/such"], "--key-file=/none/such"),
    ],
)
def test_wrong_input_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sandbox", "serve", "--port", "0", *arguments]) == 2
    assert message in capsys.readouterr().err

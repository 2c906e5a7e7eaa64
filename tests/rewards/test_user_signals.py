"""Functions that set handlers of signals run in main threads, or are refused by name and line."""

from pathlib import Path

import pytest

from mcore_rl.config import RewardConfig
from mcore_rl.rewards.function_calls import CALLS, FunctionCalls, refuse_signals
from mcore_rl.rewards.user_function import describe_failure, load_function

HEADS = {
    "import signal\n": "signal.alarm",
    "import signal as clock\n": "clock.alarm",
    "from signal import alarm as ring\n": "ring",
}
ONE = "def reward(*, data_source, solution_str, ground_truth, extra_info):\n"
ALL = "def reward(*, data_sources, solution_strs, ground_truths, extra_infos):\n"


@pytest.mark.parametrize(("head", "use"), HEADS.items())
@pytest.mark.parametrize("arguments", [ONE, ALL])
def test_an_alarm_is_refused_without_workers(
    tmp_path: Path, head: str, use: str, arguments: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"{head}{arguments}    {use}(5)\n    return 1.0\n")
    function = load_function(str(path), "reward")
    remedy = "write reward for one sample .*, and set" if arguments == ALL else "set"
    with pytest.raises(
        ValueError,
        match=rf"mine.py line 3 uses {use}, which works in a main thread only, and with "
        rf"reward.workers=0 .*: {remedy} reward.workers=1 or more",
    ):
        FunctionCalls(RewardConfig(path=str(path)), function)


def test_an_alarm_works_in_workers(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import signal, time\n"
        "def ring(*_):\n"
        "    raise TimeoutError('rang')\n"
        f"{ONE}"
        "    signal.signal(signal.SIGALRM, ring)\n"
        "    signal.setitimer(signal.ITIMER_REAL, 0.2)\n"
        "    try:\n"
        "        time.sleep(float(solution_str))\n"
        "        return 1.0\n"
        "    finally:\n"
        "        signal.setitimer(signal.ITIMER_REAL, 0)\n"
    )
    config = RewardConfig(path=str(path), workers=1)
    calls = FunctionCalls(config, load_function(str(path), "reward"))
    try:
        rows = [("", "0", "", {}), ("", "20", "", {})]
        assert calls(rows) == [{"score": 1.0}, "TimeoutError: rang"]
    finally:
        calls.close()


def test_other_uses_of_the_module_and_other_modules_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"import signal\n{ONE}    alarm = signal.SIGALRM\n    return float(alarm)\n")
    calls = FunctionCalls(RewardConfig(path=str(path)), load_function(str(path), "reward"))
    assert calls([("", "a", "", {})]) == [{"score": 14.0}]


def test_an_alarm_inside_a_library_is_told_with_the_remedy() -> None:
    error = ValueError("signal only works in main thread of the main interpreter")
    assert describe_failure(error).endswith(
        ": set reward.workers=1 or more, whose processes call"
        " a function of one sample in their main thread"
    )


@pytest.mark.parametrize("call", CALLS)
def test_the_first_use_is_named(tmp_path: Path, call: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"import signal\ndef f(): signal.{call}(1)\nsignal.alarm(0)\n")
    with pytest.raises(ValueError, match=rf"mine.py line 2 uses signal.{call}, .* calls f: "):
        refuse_signals(str(path), "f", takes_all=False)

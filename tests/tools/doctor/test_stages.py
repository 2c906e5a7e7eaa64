"""Stages are chosen by name, and run in their own order."""

import subprocess
import sys

import pytest

from mcore_rl.tools.doctor.runner import STAGES, choose_stages, describe_checks, find_check


def test_all_stages_are_chosen_by_default_and_named_ones_in_their_order() -> None:
    assert choose_stages("") == STAGES
    assert [stage.name for stage in choose_stages("probes, sync")] == ["sync", "probes"]


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--stages=sync,probe: no stage 'probe'; there are sync,"):
        choose_stages("sync,probe")


def test_checks_are_chosen_one_by_one_in_their_order() -> None:
    te, run = choose_stages("", "run:GRPO_with_SGLang, te:shared prefixes,te:speed")
    assert (te.name, [check.name for check in te.checks]) == ("te", ["speed", "shared prefixes"])
    assert (run.name, [check.name for check in run.checks]) == ("run", ["GRPO with SGLang"])


def test_an_unknown_check_is_refused_with_the_list() -> None:
    message = r"--checks=te:sped: no check 'te:sped'; there are sync:in place, .*te:speed, .*rises$"
    with pytest.raises(ValueError, match=message):
        choose_stages("", "te:sped")
    with pytest.raises(ValueError, match="--stages=te and --checks=te:speed: choose by one"):
        choose_stages("te", "te:speed")


def test_every_check_fits_a_call_of_ten_minutes() -> None:
    assert max(check.deadline_s for stage in STAGES for check in stage.checks) <= 560


def test_the_list_says_what_each_check_may_take() -> None:
    *lines, total = describe_checks(choose_stages("te")).splitlines()
    assert len(lines) == 7 and total == "7 checks, at most 1840 s"
    assert "te:speed                 " in lines[2]
    assert lines[2].endswith(
        " 240 s  Tokens and operations per second of a step over four micro-batches."
    )
    assert lines[-1].endswith("(needs a GPU)")


def test_every_check_is_found_by_its_names() -> None:
    for stage in STAGES:
        assert len({check.name for check in stage.checks}) == len(stage.checks)
        for check in stage.checks:
            assert find_check(stage.name, check.name) is check


ONLY_TORCH = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import mcore_rl.tools.doctor.runner
"""


def test_checks_are_listed_where_torch_is_there_and_little_else() -> None:
    """A machine may have what the stages sync and probes need, and nothing of the others."""
    missing = "pyarrow,transformers,tokenizers,megatron,transformer_engine,sglang,ray,hydra,aiohttp"
    command = [sys.executable, "-c", ONLY_TORCH, f"{missing},safetensors,zlib_ng,orjson"]
    subprocess.run(command, check=True, timeout=120)

"""Servers of a run: none by default, and no option of one that is not started."""

import pytest

from mcore_rl.config import Config, SandboxConfig, SearchConfig
from mcore_rl.config.servers import SandboxConfig as Declared


def test_a_run_starts_no_server_by_default() -> None:
    assert not SandboxConfig().is_used and not SearchConfig().is_used
    assert SandboxConfig(workers=1).is_used and SearchConfig(index="i").is_used
    assert Declared is SandboxConfig


def test_options_of_a_server_that_is_not_started_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sandbox.wall_s=3.0 with sandbox.workers=0"):
        Config(sandbox=SandboxConfig(wall_s=3.0))
    with pytest.raises(ValueError, match=r"search.method=dense with search.index=''"):
        Config(search=SearchConfig(method="dense"))
    Config(sandbox=SandboxConfig(workers=2, wall_s=3.0), search=SearchConfig("i", "dense"))


def test_bounds_that_contradict_one_another_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sandbox.max_memory_mib=100 is less than .*=512"):
        SandboxConfig(workers=1, max_memory_mib=100)
    with pytest.raises(ValueError, match=r"search.queue_len=3 is less than search.threads=4"):
        SearchConfig(index="i", queue_len=3)
    with pytest.raises(ValueError, match=r"sandbox.workers=-1: must be at least 0"):
        SandboxConfig(workers=-1)

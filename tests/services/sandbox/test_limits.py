"""Limits are positive, and a record's account is plain JSON."""

import json
from typing import Any

import pytest

from mcore_rl.services.sandbox.limits import Limits, RunRecord, RunVerdict


@pytest.mark.parametrize("name", ["wall_s", "memory_mib", "processes", "cpus"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_limit_must_be_positive(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        Limits(**{name: value})


def test_an_account_has_all_but_the_output() -> None:
    record = RunRecord(RunVerdict.MEMORY, 137, b"secret", b"", "more than 9 MiB", 1.5, 0.5, 7)
    account = json.loads(json.dumps(record.account()))
    assert account["verdict"] == "memory"
    assert account["limits"]["memory_mib"] == 512
    assert (account["wall_s"], account["cpu_s"], account["memory_bytes"]) == (1.5, 0.5, 7)
    assert "secret" not in json.dumps(account)

"""A calculator that computes in the run's sandbox, and a reward that asks the run's search server.

So that an episode needs every process that a run with tools has.
"""

import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from mcore_rl.process.server_keys import SEARCH_URL
from mcore_rl.rewards.code.execution import CaseSettings, run_cases, script_case
from mcore_rl.services.search.client import SearchClient

_SUM = re.compile(r"\s*\d+(\s*[-+]\s*\d+)*\s*")
_SETTINGS = CaseSettings(wall_s=20.0, total_s=40.0)


def calculator(expression: str) -> str:
    """Compute a sum.

    expression: whole numbers with + and - between them
    """
    if not _SUM.fullmatch(expression):
        raise ValueError(f"{expression!r} is no sum of whole numbers")
    [run] = run_cases([f"print({expression.strip()})"], [script_case("")], _SETTINGS)
    return run.out.strip()


def reward(conversation: Sequence[Mapping[str, Any]], task: Mapping[str, Any]) -> float:
    """Return 1 if the last answer ends with the right number, else 0."""
    client = _client()
    if client is not None:
        client.retrieve([str(task["messages"][0]["content"])], 1)
    numbers = re.findall(r"-?\d+", str(conversation[-1].get("content") or ""))
    return float(bool(numbers) and numbers[-1] == task["ground_truth"])


@cache
def _client() -> SearchClient | None:
    """Return the run's search server; None where the recipe is only checked."""
    url = urlsplit(os.environ.get(SEARCH_URL, ""))
    if not url.password:
        return None
    bare = url._replace(netloc=f"{url.hostname}:{url.port}")
    return SearchClient(urlunsplit(bare), key=url.password, deadline_s=60.0)

"""The interpreter that has the packages which the adapters adapt: `make agents-venv`."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mcore_rl.agents.environments.environment import Start, Step
from mcore_rl.agents.environments.pool import EnvironmentPool
from mcore_rl.agents.environments.worker_process import EnvironmentOptions
from tests.support.policy import ROOT

PYTHON = str(ROOT / ".venv-agents/bin/python")


def needs_agents_venv() -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        not (ROOT / ".venv-agents/bin/python").exists(),
        reason=".venv-agents is missing: make agents-venv",
    )


def play(
    kind: str, options: Mapping[str, Any], task: Mapping[str, Any], answers: Sequence[Any]
) -> tuple[Start, list[Step]]:
    """Play one episode in a worker of that interpreter, with these answers until it is done."""

    async def run() -> tuple[Start, list[Step]]:
        async with EnvironmentPool(
            EnvironmentOptions(kind, options, python=PYTHON, workers=1)
        ) as pool:
            episode = await pool.open(task)
            steps: list[Step] = []
            for answer in answers:
                message = {"role": "assistant", "content": answer}
                steps.append(await episode.step(answer if isinstance(answer, Mapping) else message))
                if steps[-1].done:
                    break
            await episode.close()
            return episode.start, steps

    return asyncio.run(run())


VERL = ROOT / ".venv-agents/verl"
"""verl and the packages that its import needs besides those of .venv, which has torch and ray."""


def needs_verl() -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        not VERL.exists(), reason=".venv-agents/verl is missing: make agents-venv"
    )


def verl_variables() -> dict[str, str]:
    """Return the variables of a worker that runs under .venv and imports verl."""
    return {"PYTHONPATH": f"{VERL}:{ROOT}/tests/agents/environments"}

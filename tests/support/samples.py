"""Samples for tests that log some."""

from mcore_rl.types import Prompt, Sample, VersionSpan, WeightVersion


def make_sample(index: int, text: str) -> Sample:
    messages = ({"role": "user", "content": f"What is {index} + 1?"},)
    prompt = Prompt(index, (1, 2), messages, "unit", str(index + 1))
    return Sample(prompt, 0, (5,), (-0.5,), "stop", (VersionSpan(0, 1, WeightVersion(0)),), text)

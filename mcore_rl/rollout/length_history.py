"""Remembers how long the responses to each prompt were, so that long ones can begin first."""

from collections import OrderedDict
from collections.abc import Sequence
from statistics import fmean

from mcore_rl.types import Prompt

KEPT_PROMPTS = 1_000_000


class LengthHistory:
    """Mean response length of the prompts that were sampled last."""

    def __init__(self) -> None:
        self._lens: OrderedDict[tuple[str, int], float] = OrderedDict()
        self._sum = 0.0

    def note(self, prompt: Prompt, response_lens: Sequence[int]) -> None:
        """Keep the lengths of a group in place of those of the prompt's earlier groups."""
        key = (prompt.data_source, prompt.index)
        self._sum -= self._lens.pop(key, 0.0)
        self._lens[key] = fmean(response_lens)
        self._sum += self._lens[key]
        if len(self._lens) > KEPT_PROMPTS:
            self._sum -= self._lens.popitem(last=False)[1]

    def longest_first(self, prompts: Sequence[Prompt]) -> list[int]:
        """Return the places of prompts, those with long responses first.

        A prompt without a history counts as a mean one; equal ones keep their order.
        """
        mean = self._sum / max(len(self._lens), 1)

        def expected(i: int) -> float:
            return self._lens.get((prompts[i].data_source, prompts[i].index), mean)

        return sorted(range(len(prompts)), key=lambda i: -expected(i))

"""Qwen2 and Qwen3 score heads without a bias.

SGLang's heads have a bias that no checkpoint fills, so it would hold random numbers.
"""

from typing import Any

from sglang.srt.models import qwen2_classification, qwen3_classification
from torch import nn


def _without_bias(score: nn.Linear) -> nn.Linear:
    return nn.Linear(score.in_features, score.out_features, bias=False)


class Qwen2ForSequenceClassification(qwen2_classification.Qwen2ForSequenceClassification):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.score = _without_bias(self.score)


class Qwen3ForSequenceClassification(qwen3_classification.Qwen3ForSequenceClassification):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.score = _without_bias(self.score)


EntryClass = [Qwen2ForSequenceClassification, Qwen3ForSequenceClassification]

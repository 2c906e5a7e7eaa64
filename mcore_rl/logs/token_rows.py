"""The tokens of a sample for its row in samples.jsonl: texts, log-probs, versions, what is trained.

Of a single response the one row is prompt and response; of an episode, the rows that train it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mcore_rl.types import Sample

MOST_TOKENS = 4096
"""Tokens of a sample that are written; a row says how many more it has."""
_DIGITS = 4
"""Decimal places of a log-prob."""


class TokenTexts:
    """The text of each token id, decoded by itself and kept."""

    def __init__(self, tokenizer: Any) -> None:
        """Take a tokenizer of transformers."""
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __call__(self, token_ids: Sequence[int]) -> list[str]:
        new = sorted(set(token_ids) - self._texts.keys())
        if new:
            decoded = self._tokenizer.batch_decode([[token] for token in new])
            self._texts.update(zip(new, decoded, strict=True))
        return [self._texts[token] for token in token_ids]


def make_token_rows(
    sample: Sample, to_texts: Callable[[Sequence[int]], list[str]]
) -> list[dict[str, Any]]:
    """Return the rows of a sample, MOST_TOKENS in all.

    texts     of each token
    trained   [start, stop, turn] of tokens that are trained; turn 0 of a single response
    logprobs  the engine's, of the trained tokens, in order
    versions  [start, stop, version] of the weights that sampled them
    cut       tokens left out at the end; missing if there are none
    """
    rows = []
    left = MOST_TOKENS
    for token_ids, logprobs, trained, versions in _list_rows(sample):
        shown = token_ids[:left]
        left -= len(shown)
        spans = _cut_spans(trained, len(shown))
        num_trained = sum(stop - start for start, stop, _ in spans)
        row: dict[str, Any] = {
            "texts": to_texts(shown),
            "trained": spans,
            "logprobs": [round(logprob, _DIGITS) for logprob in logprobs[:num_trained]],
            "versions": _cut_spans(versions, len(shown)),
        }
        if len(shown) < len(token_ids):
            row["cut"] = len(token_ids) - len(shown)
        rows.append(row)
    return rows


Span = list[int]
"""Start, stop, and the turn or version of the tokens between."""


def _list_rows(
    sample: Sample,
) -> Iterator[tuple[list[int], list[float], list[Span], list[Span]]]:
    """Yield (ids, log-probs of the trained tokens, spans of turns, spans of versions)."""
    if sample.episode is None:
        start = len(sample.prompt.token_ids)
        ids = [*sample.prompt.token_ids, *sample.response_ids]
        versions = [[start + s.start, start + s.stop, int(s.version)] for s in sample.versions]
        yield ids, list(sample.logprobs), [[start, len(ids), 0]], versions
        return
    for row in sample.episode.rows:
        trained = _find_spans(row.turn_T.tolist())
        versions = [[s.start, s.stop, int(s.version)] for s in row.versions]
        yield row.token_ids.tolist(), row.logprobs[row.is_trained].tolist(), trained, versions


def _find_spans(turn_T: Sequence[int]) -> list[Span]:
    """Return the spans of equal turns; tokens of turn -1 are in none."""
    spans: list[Span] = []
    for place, turn in enumerate(turn_T):
        if turn < 0:
            continue
        if spans and spans[-1][1] == place and spans[-1][2] == turn:
            spans[-1][1] = place + 1
        else:
            spans.append([place, place + 1, turn])
    return spans


def _cut_spans(spans: Sequence[Span], num_tokens: int) -> list[Span]:
    return [
        [start, min(stop, num_tokens), value] for start, stop, value in spans if start < num_tokens
    ]

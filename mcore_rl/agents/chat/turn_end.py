"""Finds where an answer's turn ends in a rendered conversation, and what follows it."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class TurnEnd:
    """The stop tokens of an engine, as texts in a rendered conversation."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int]) -> None:
        self._stops = {
            token_id: str(tokenizer.decode([token_id], skip_special_tokens=False))
            for token_id in stop_token_ids
        }
        added = tokenizer.added_tokens_decoder.values()
        self._tokens = sorted(
            {*(str(token.content) for token in added), *self._stops.values()},
            key=len,
            reverse=True,
        )
        self._special = {str(token.content) for token in added if token.special}

    def sampled_stop(self, answer_ids: Sequence[int]) -> str | None:
        """Return the text of the stop token that ends the answer; None if it was cut off."""
        return self._stops.get(answer_ids[-1]) if answer_ids else None

    def tail(self, alone: str, now: str, answer_ids: Sequence[int]) -> str | None:
        """Return the text that follows the sampled answer; None if its place isn't known.

        alone   text after the answer's last part if nothing follows the answer
        now     the same if messages and the generation prompt follow

        Either a token closes the answer's turn. The sampled stop token stands for it even if it is
        another one: gpt-oss samples <|return|> and later reads <|end|>. Or the next message opens
        with a stop token, as GLM's <|user|> and <|observation|> do. It follows an answer that was
        cut off or that ended with another stop token.
        """
        stop = self.sampled_stop(answer_ids)
        closing = self._closing(alone)
        start = len(alone) if closing is None else closing
        if not now.startswith(alone[:start]):
            return None
        rest = now[start:]
        if closing is None:
            return rest.removeprefix(stop) if stop else rest
        token = next((token for token in self._tokens if token and rest.startswith(token)), None)
        if token is None:
            return None
        return rest.removeprefix(token) if stop else rest

    def _closing(self, text: str) -> int | None:
        """Return where the token that closes the answer's turn begins; None if there is none.

        It is the first stop token, or else a special token that is all that follows the answer:
        templates may close turns with a token that the model's settings do not name.
        """
        starts = [text.find(stop) for stop in self._stops.values() if stop and stop in text]
        if starts:
            return min(starts)
        return text.find(text.strip()) if text.strip() in self._special else None

"""Says how an engine speculates. Imported by processes that do without torch."""

from dataclasses import dataclass

NGRAM, MTP = "NGRAM", "EAGLE"
"""SGLang's names of ways to guess."""


@dataclass(frozen=True)
class Speculation:
    """How an engine guesses, and how many tokens for each request at a time."""

    method: str
    num_tokens: int

    def list_flags(self) -> list[str]:
        """Return SGLang's options, whose number of drafts includes the token that they follow."""
        flags = ["--speculative-num-draft-tokens", str(self.num_tokens + 1)]
        if self.method == "ngram":
            return ["--speculative-algorithm", NGRAM, *flags]
        flags += ["--speculative-num-steps", str(self.num_tokens), "--speculative-eagle-topk", "1"]
        return ["--speculative-algorithm", MTP, *flags]


def make_speculation(method: str, num_tokens: int) -> Speculation | None:
    """Return what rollout.speculate and rollout.speculate_tokens ask for."""
    return None if method == "none" else Speculation(method, num_tokens)

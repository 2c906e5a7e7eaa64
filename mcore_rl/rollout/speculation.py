"""Says how an engine speculates. Imported by processes that do without torch."""

from dataclasses import dataclass

NGRAM, MTP = "NGRAM", "EAGLE"
"""SGLang's names of ways to guess."""
NUM_STEPS, WHEN_FASTER = "--speculative-num-steps", "--speculative-adaptive"
"""SGLang's options for the number of guesses, and to choose it for each pass."""


@dataclass(frozen=True)
class Speculation:
    """How an engine guesses, and how many tokens for each request at a time.

    when_faster   with mtp: only where the engine measures that guessing is faster
    """

    method: str
    num_tokens: int
    when_faster: bool = False

    def list_flags(self) -> list[str]:
        """Return SGLang's options, whose number of drafts includes the token that they follow."""
        flags = ["--speculative-num-draft-tokens", str(self.num_tokens + 1)]
        if self.method == "ngram":
            return ["--speculative-algorithm", NGRAM, *flags]
        flags += [NUM_STEPS, str(self.num_tokens), "--speculative-eagle-topk", "1"]
        if self.when_faster:
            flags.append(WHEN_FASTER)
        return ["--speculative-algorithm", MTP, *flags]


def make_speculation(method: str, num_tokens: int, when: str) -> Speculation | None:
    """Return what rollout.speculate, rollout.speculate_tokens and rollout.speculate_when ask for.

    N-grams are always guessed with: SGLang has no pass without them.
    """
    if method == "none":
        return None
    return Speculation(method, num_tokens, when_faster=method == "mtp" and when == "faster")

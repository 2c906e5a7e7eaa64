"""Says how an engine speculates. Imported by processes that do without torch."""

from dataclasses import dataclass

ALGORITHM, NGRAM, MTP = "--speculative-algorithm", "NGRAM", "EAGLE"
"""SGLang's option for a way to guess, and its names of two."""
NUM_STEPS, WHEN_FASTER = "--speculative-num-steps", "--speculative-adaptive"
"""SGLang's options for the number of guesses, and to choose it for each pass. SGLang itself has no
such choice with n-grams; mcore_rl.rollout.server takes the option then."""


@dataclass(frozen=True)
class Speculation:
    """How an engine guesses, and how many tokens for each request at a time.

    when_faster   only where the engine measures that guessing is faster
    """

    method: str
    num_tokens: int
    when_faster: bool = False

    def list_flags(self) -> list[str]:
        """Return SGLang's options, whose number of drafts includes the token that they follow."""
        flags = ["--speculative-num-draft-tokens", str(self.num_tokens + 1)]
        if self.method == "mtp":
            flags += [NUM_STEPS, str(self.num_tokens), "--speculative-eagle-topk", "1"]
        if self.when_faster:
            flags.append(WHEN_FASTER)
        return [ALGORITHM, NGRAM if self.method == "ngram" else MTP, *flags]


def make_speculation(method: str, num_tokens: int, when: str) -> Speculation | None:
    """Return what rollout.speculate and its options with _tokens and _when ask for."""
    if method == "none":
        return None
    return Speculation(method, num_tokens, when_faster=when == "faster")

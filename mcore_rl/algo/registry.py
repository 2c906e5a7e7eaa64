"""Registers the functions that recipes choose by name, with their arguments and their needs."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Generic, Literal, TypeVar, get_args

from torch import Tensor

from mcore_rl.algo.outcomes import Outcomes
from mcore_rl.config import AlgorithmConfig, CovarianceConfig

Pick = Callable[[Tensor, CovarianceConfig, int], Tensor]
"""(covariance_R of the trained tokens, options, seed) -> indices of the tokens to hold back."""
Metrics = dict[str, Tensor]
"""Detached values of each token by metric name."""


@dataclass(frozen=True)
class LossTokens:
    """The tokens of a micro-batch on one rank.

    logprobs_T, log_ratio_T   with gradient; 0 off the loss mask
    advantages_T              0 off the loss mask
    sequence_mean, sequence_sum
                              take values_T and return, at each token, their mean or sum over the
                              trained tokens of the whole sample, whatever rows, micro-batches and
                              ranks these lie in; without gradient; need Needs.whole_samples
    held_back_T               bool, tokens chosen by algo/covariance.py; None unless the loss needs
                              them
    """

    logprobs_T: Tensor
    log_ratio_T: Tensor
    advantages_T: Tensor
    sequence_mean: Callable[[Tensor], Tensor]
    sequence_sum: Callable[[Tensor], Tensor]
    held_back_T: Tensor | None = None


@dataclass(frozen=True)
class Needs:
    """The things a run must provide for an advantage or a loss, besides rewards and the engine's
    log-probs.

    critic           values of each token, from a critic (Outcomes.values_R)
    greedy_baseline  the reward of a greedy response to each prompt (Outcomes.greedy_N)
    reference        log-probs of the weights that training began with (Outcomes.ref_logprobs_R)
    teacher          a teacher's log-probs of the sampled tokens (Outcomes.teacher_logprobs_R)
    parts            a reward made of several parts (Outcomes.parts)
    others           other samples of the same prompt; with a single one every advantage would be 0
    old_logprobs     the trainer's log-probs of the samples before the first optimizer step
    sum_squares      the sum of squared probabilities at each token (Outcomes.energy_R); implies
                     old_logprobs
    pairs            the advantages hold the whole loss of preference pairs: the loss must be
                     policy_gradient, the aggregation token_sum, and a rollout takes one optimizer
                     step
    held_back        chooses the tokens that the loss holds back (LossTokens.held_back_T)
    whole_samples    means or sums over whole samples (LossTokens.sequence_mean, sequence_sum),
                     whose rows may lie on several ranks; a loss that takes one without this is
                     refused
    whole_batch      means over all samples of an optimizer step, whatever ranks these lie on
    """

    critic: bool = False
    greedy_baseline: bool = False
    reference: bool = False
    teacher: bool = False
    parts: bool = False
    others: bool = False
    old_logprobs: bool = False
    sum_squares: bool = False
    pairs: bool = False
    held_back: Pick | None = None
    whole_samples: bool = False
    whole_batch: bool = False

    def join(self, other: "Needs") -> "Needs":
        """Everything that either of the two needs."""
        union = {
            field.name: getattr(self, field.name) or getattr(other, field.name)
            for field in fields(self)
        }
        return Needs(**union)


F = TypeVar("F", bound=Callable)
Sees = Literal["samples", "groups", "step"]
"""The part of a step that an advantage must see at once.

samples  a number of each sample: its reward, group and length, and sums over its tokens; it is the
         same at all tokens of a sample
groups   all tokens of the samples of a prompt; its result depends on no other prompt
step     all tokens of the step, which one process then holds
"""


@dataclass(frozen=True)
class Registration(Generic[F]):
    """A registered function, the things it needs, and the options it reads (None: unknown).

    sees         what an advantage must see at once
    normalized   an advantage is yet to be normalized over all trained tokens of the step
    """

    function: F
    needs: Needs
    reads: tuple[str, ...] | None
    sees: Sees
    normalized: bool


class Registry(Generic[F]):
    """Functions by name; `option` is the recipe key that chooses among them."""

    def __init__(self, option: str) -> None:
        self.option = option
        self._entries: dict[str, Registration[F]] = {}

    def register(
        self,
        name: str,
        needs: Needs | None = None,
        reads: tuple[str, ...] | None = None,
        *,
        sees: Sees = "step",
        normalized: bool = False,
    ) -> Callable[[F], F]:
        """Decorate a function to make it a choice.

        Raises ValueError if `name` is taken, or `normalized` contradicts `sees`.

        `reads` names the options that the function reads and other choices may not. A recipe with
        this choice is refused if it sets an option that only other choices read. None: unknown, so
        no option is refused.

        sees         of an advantage: `samples` if it returns Outcomes.spread of values that it
                     computed from numbers by sample alone, `groups` if it treats each prompt by
                     itself; tokens then stay where they were sampled
        normalized   of an advantage that sees groups or the step: it returns float64, which is
                     then normalized over the step's trained tokens, to mean 0 and variance 1
        """
        choice = f"{self.option}={name!r}"
        if sees not in get_args(Sees):
            raise ValueError(f"{choice}: sees={sees!r}, expected one of {get_args(Sees)}")
        if normalized and sees == "samples":
            raise ValueError(
                f"{choice}: normalized=True with sees='samples': no token is there to normalize"
                " over; normalize by sample in the function, or set sees='groups'"
            )

        def add(function: F) -> F:
            if name in self._entries:
                owner = getattr(self._entries[name].function, "__module__", "another module")
                raise ValueError(f"{choice} is registered already, by {owner}: choose another name")
            self._entries[name] = Registration(function, needs or Needs(), reads, sees, normalized)
            return function

        return add

    def __getitem__(self, name: str) -> F:
        """Raise ValueError naming the option, the nearest and all names if `name` is unknown."""
        return self.entry(name).function

    def entry(self, name: str) -> Registration[F]:
        """Return what `name` was registered with. Raises ValueError like `[]`."""
        if name not in self._entries:
            near = difflib.get_close_matches(name, self._entries, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            choices = ", ".join(map(repr, self.names))
            raise ValueError(f"{self.option}={name!r}{hint}: expected one of {choices}")
        return self._entries[name]

    def needs(self, name: str) -> Needs:
        """Return what `name` was registered with. Raises ValueError like `[]`."""
        return self.entry(name).needs

    def unread_by(self, name: str) -> dict[str, list[str]]:
        """Return each option that other choices read and `name` does not, with those choices.

        Raises ValueError like `[]`.
        """
        own = self.entry(name).reads
        if own is None:
            return {}
        readers: dict[str, list[str]] = {}
        for other in self.names:
            for option in self._entries[other].reads or ():
                readers.setdefault(option, []).append(other)
        return {option: names for option, names in readers.items() if option not in own}

    @property
    def names(self) -> list[str]:
        return sorted(self._entries)

    def keep_only(self, names: list[str]) -> None:
        """Remove every entry that is not in `names`, to undo the registrations of a file that
        failed.
        """
        self._entries = {name: entry for name, entry in self._entries.items() if name in names}


Advantage = Callable[[Outcomes, AlgorithmConfig], Tensor]
"""Outcomes of a step's samples -> advantages_R, float32."""
PolicyLoss = Callable[[LossTokens], tuple[Tensor, Metrics]]
"""Tokens -> (loss_T, metrics_T)."""
PolicyLossMaker = Callable[[AlgorithmConfig], PolicyLoss]
"""Options -> the loss with its constants bound."""
advantages: Registry[Advantage] = Registry("algorithm.advantage")
losses: Registry[PolicyLossMaker] = Registry("algorithm.loss")

"""Keeps what is trained on a rank: all weights, one adapter, or several that take turns.

    one model, one W0        DDP and optimizer of adapter "ada" <--- chosen: W = W0 + s B A of "ada"
                             DDP and optimizer of adapter "bob"

Each adapter has factors, gradient buffers, an optimizer and a count of steps of its own. Layers and
frozen weights are there once, and have the merged weights of the adapter whose turn it is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer import TransformerConfig

from mcore_rl.train.guarded_optimizer import GuardedOptimizer
from mcore_rl.train.lora.adapter import LoraAdapter
from mcore_rl.weights.lora.facts import AdapterFacts
from mcore_rl.weights.lora.places import Held


@dataclass
class Learner:
    """All that an optimizer updates, on one rank.

    name       of the adapter; "": it is the only one, or all weights are trained
    adapter    None: all weights are trained
    chunks     the model's chunks in Megatron's DDP, whose buffers have what is trained alone
    finalize   is called with all chunks after the last backward pass of a step
    step       optimizer steps taken or skipped
    """

    name: str
    adapter: LoraAdapter | None
    chunks: list[DistributedDataParallel]
    optimizer: GuardedOptimizer
    finalize: Callable[..., Any]
    step: int = 0


class Turns:
    """The learners of a rank. One of them is chosen."""

    def __init__(self, learners: Sequence[Learner], config: TransformerConfig) -> None:
        """Choose the first learner. `config` is the model's, and has what the chosen one needs."""
        self.learners = {learner.name: learner for learner in learners}
        self._config = config
        self.chosen = learners[0]
        self._put_in(self.chosen)

    @property
    def step(self) -> int:
        """Optimizer steps of all learners together."""
        return sum(learner.step for learner in self.learners.values())

    @property
    def steps(self) -> dict[str, int]:
        """Optimizer steps of each learner, by name."""
        return {name: learner.step for name, learner in self.learners.items()}

    def count_from(self, steps: Mapping[str, int]) -> None:
        """Go on with as many steps of each learner as `steps` has."""
        for name, learner in self.learners.items():
            learner.step = steps[name]

    @property
    def facts(self) -> dict[str, AdapterFacts]:
        """Facts of the adapters, by name; {} if all weights are trained."""
        return {
            name: learner.adapter.facts
            for name, learner in self.learners.items()
            if learner.adapter is not None
        }

    def list_factors(self) -> dict[str, Held]:
        """Return the shards and tensors of the factors of several adapters, by name."""
        return {
            name: learner.adapter.list_factors()
            for name, learner in self.learners.items()
            if name and learner.adapter is not None
        }

    def choose(self, name: str) -> None:
        """Give the model the weights of adapter `name`, which is trained from now on.

        Raises ValueError if there is no such adapter.
        """
        if name not in self.learners:
            known = ", ".join(filter(None, self.learners)) or "none by name"
            raise ValueError(f"there is no adapter {name!r} to train: there are {known}")
        if name == self.chosen.name:
            return
        self.chosen = self.learners[name]
        self._put_in(self.chosen)
        self.merge()

    def merge(self) -> None:
        """Compute the model's weights from the factors of the chosen adapter, if there is one."""
        if self.chosen.adapter is not None:
            self.chosen.adapter.merge()

    def visit(self) -> Iterator[Learner]:
        """Yield each learner while its factors are in the chunks; weights stay as they are."""
        try:
            for learner in self.learners.values():
                self._put_in(learner)
                yield learner
        finally:
            self._put_in(self.chosen)

    def close(self) -> None:
        """Empty the model, so that all of it can be freed; nothing may be called afterwards.

        Layers hold graphs of their last forward pass, and these hold DDP's hooks, and with them the
        layers: a ring through C++ that Python's collector does not see. Learners share layers.
        """
        chunks = [chunk for learner in self.learners.values() for chunk in learner.chunks]
        for module in {module for chunk in chunks for module in chunk.modules()}:
            vars(module).clear()

    def _put_in(self, learner: Learner) -> None:
        if learner.adapter is not None:
            learner.adapter.put_in()
        self._config.finalize_model_grads_func = learner.finalize


MakeLearner = Callable[[Sequence[torch.nn.Module], LoraAdapter | None], Learner]
"""(chunks, adapter) -> what trains the adapter, whose factors are in the chunks. Without an adapter
(None) it trains all weights."""


def make_turns(
    chunks: Sequence[torch.nn.Module],
    adapters: Sequence[LoraAdapter],
    config: TransformerConfig,
    make_learner: MakeLearner,
) -> Turns:
    """Return what trains each adapter, or all weights; the first adapter's turn is the first."""
    if not adapters:
        return Turns([make_learner(chunks, None)], config)
    learners = []
    for adapter in adapters:
        adapter.put_in()
        learners.append(make_learner(chunks, adapter))
    for adapter in adapters:
        adapter.watch_gradients()
    adapters[0].pass_gradients_on()
    turns = Turns(learners, config)
    if len(learners) > 1:
        turns.merge()  # The last one's factors may have been read from a file.
    return turns

"""Draws when GPUs and machines fail, and takes down the engines or the run that had them."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace

from mcore_rl.config import Config
from mcore_rl.rollout.engine_health import EngineHealth, EngineState
from mcore_rl.tools.simulate.engine import SimulatedEngine
from mcore_rl.tools.simulate.engines import SimulatedCollector
from mcore_rl.tools.simulate.placement import ProcessPlacement
from mcore_rl.tools.simulate.virtual_loop import VirtualLoop, context_of


class RunLostError(RuntimeError):
    """The run has ended and begins again from its newest checkpoint; the message says why."""


class Failures:
    """Breaks engines, trainer ranks and machines at random times, each a Poisson process."""

    def __init__(
        self,
        loop: VirtualLoop,
        config: Config,
        engines: Mapping[str, SimulatedEngine],
        health: EngineHealth,
        placement: ProcessPlacement,
        collectors: Mapping[str, SimulatedCollector],
        num_trainer_gpus: int,
        draw: random.Random,
    ) -> None:
        """`collectors` are those of nodes by name."""
        self._loop = loop
        self._config = config
        self._engines = engines
        self._health = health
        self._placement = placement
        self._collectors = collectors
        self._draw = draw
        self._context = context_of("failures")
        self._timers: list[asyncio.TimerHandle] = []
        self.num_engines_lost = 0
        self.num_nodes_lost = 0
        self.lost: asyncio.Future[None] = loop.create_future()
        """Raises RunLostError once the run cannot go on."""
        self._mtbf_s = config.simulate.mtbf_hours * 3600
        if self._mtbf_s:
            if num_trainer_gpus:
                self._later(self._next_s(num_trainer_gpus), self._lose_trainer)
            for url in engines:
                self._arm_engine(url)
        node_mtbf_s = config.simulate.node_mtbf_hours * 3600
        if node_mtbf_s:
            for node in sorted(placement.nodes):
                self._later(draw.expovariate(1 / node_mtbf_s), self.lose_node, node)

    def end(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def _later(self, seconds: float, function: object, *args: object) -> None:
        self._timers.append(
            self._loop.call_later(seconds, function, *args, context=self._context)  # type: ignore[arg-type]
        )

    def _next_s(self, num_gpus: int) -> float:
        return self._draw.expovariate(num_gpus / self._mtbf_s)

    def _arm_engine(self, url: str) -> None:
        self._later(self._next_s(self._config.rollout.engine_ranks), self._lose_engine, url)

    def _lose_trainer(self) -> None:
        self._lose("a GPU of the trainer failed")

    def _lose(self, why: str) -> None:
        if not self.lost.done():
            self.lost.set_exception(RunLostError(why))

    def lose_node(self, node: str) -> None:
        """Lose a machine: its ranks and with them the run, else its engines and its samples."""
        self.num_nodes_lost += 1
        if node in self._placement.trainer_nodes:
            self._lose(f"{node} failed, which has ranks of the trainer or critic")
            return
        for url, nodes in zip(self._engines, self._placement.engine_nodes, strict=True):
            if node in nodes:
                self.num_engines_lost += not self._state(url).lost
                self._engines[url].fail()
                self._health.lose(url, f"{node} failed")
        if node in self._collectors:
            self._collectors[node].lose(f"collector of {node} is lost with its machine")
        num_left = sum(not state.lost for state in self._health.states)
        if num_left < self._config.rollout.min_engines:
            self._lose(
                f"{node} failed, and {num_left} engines are left of"
                f" rollout.min_engines={self._config.rollout.min_engines}"
            )

    def _lose_engine(self, url: str) -> None:
        if self._state(url).lost:
            return
        self.num_engines_lost += 1
        self._engines[url].fail()
        state = self._state(url)
        if state.restarts >= self._config.rollout.restarts:
            self._lose(
                f"{url} failed, and was started again rollout.restarts={state.restarts} times"
            )
            return
        self._health.note([replace(state, restarts=state.restarts + 1, healthy=False)])
        self._later(self._config.simulate.engine_restart_s, self._return_engine, url)

    def _return_engine(self, url: str) -> None:
        if self._state(url).lost:
            return
        self._engines[url].restart()
        self._health.note([replace(self._state(url), healthy=True)])
        self._arm_engine(url)

    def _state(self, url: str) -> EngineState:
        return next(state for state in self._health.states if state.url == url)

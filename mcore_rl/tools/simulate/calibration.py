"""Corrects predictions by what a run of a few steps has measured.

A run in rollout.mode=sync, where phases follow one another, tells how much longer each phase takes
than predicted. The same factors then hold for other modes, lengths, batches and longer runs.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

from omegaconf import DictConfig, OmegaConf

from mcore_rl.config import Config, PlanConfig, SimulateConfig
from mcore_rl.config.recipe import make_config
from mcore_rl.logs.run_report import load_metrics
from mcore_rl.tools.simulate.costs import RecipeCosts
from mcore_rl.tools.simulate.simulate import simulate
from mcore_rl.tools.simulate.virtual_time import ReachedShares

_log = logging.getLogger(__name__)

PHASES = ("rollout", "reward", "logprobs", "train", "sync", "step")
WIDEST = 5.0
"""Largest spread of lengths that is looked for."""
LEAST_S = 1e-3
"""Phases that are shorter have nothing that could be corrected by a factor."""


@dataclass(frozen=True)
class Calibration:
    """Measured over predicted seconds of each phase, and the measured lengths in tokens.

    other_s   seconds of a step that no phase of the simulation has
    """

    rollout: float
    train: float
    sync: float
    reward_s: float
    other_s: float
    prompt_len: int
    response_len: float
    response_spread: float

    @staticmethod
    def measure(run_dir: Path, plan: PlanConfig, simulated: SimulateConfig) -> "Calibration":
        """Compare the last step of a run with its simulation on the hardware that is assumed.

        Raises ValueError if the folder has no finished step, or of another mode.
        """
        config = _read_config(run_dir)
        rows = [row for row in load_metrics(run_dir) if "time/step" in row]
        measured = {name: float(rows[-1].get(f"time/{name}", 0.0)) for name in PHASES}
        lens = _lens(rows[-1], config.rollout.max_response_len)
        prompt_len = _prompt_len(rows[-1], config.train.epochs, config.data.max_prompt_len)
        config = replace(
            config,
            run=replace(config.run, steps=2),
            plan=plan,
            simulate=replace(
                simulated,
                steps=2,
                prompt_len=prompt_len,
                response_len=lens[0],
                response_spread=lens[1],
                reward_s=0.0,
                mtbf_hours=0.0,
            ),
            eval=replace(config.eval, data=[], every_steps=0),
            checkpoint=replace(config.checkpoint, every_steps=0),
        )
        costs = RecipeCosts.make(config, ReachedShares())
        steps = simulate(config, costs).steps
        predicted = {name: steps[2].get(f"time/{name}", 0.0) for name in PHASES}
        corrected = measured["rollout"] + measured["reward"] + measured["train"] + measured["sync"]
        corrected += float(rows[-1].get("recovery/keep_seconds", 0.0))
        return Calibration(
            rollout=_factor(measured, predicted, "rollout"),
            train=_factor(measured, predicted, "train"),
            sync=_factor(measured, predicted, "sync"),
            reward_s=measured["reward"],
            other_s=max(measured["step"] - corrected - _passes_s(predicted), 0.0),
            prompt_len=prompt_len,
            response_len=lens[0],
            response_spread=lens[1],
        )

    def apply(
        self, simulated: SimulateConfig, costs: RecipeCosts
    ) -> tuple[SimulateConfig, RecipeCosts]:
        """Return what is simulated, and costs, as measured; lengths that the user gave stay."""
        if not simulated.response_len:
            simulated = replace(
                simulated, response_len=self.response_len, response_spread=self.response_spread
            )
        simulated = replace(
            simulated,
            prompt_len=simulated.prompt_len or self.prompt_len,
            reward_s=simulated.reward_s or self.reward_s,
        )
        costs = replace(
            costs,
            engine=costs.engine.slow_down(self.rollout),
            trainer=replace(costs.trainer, factor=self.train),
            critic=costs.critic and replace(costs.critic, factor=self.train),
            sync_s=costs.sync_s * self.sync,
            swap_s=costs.swap_s * self.sync,
            read_back_s=costs.read_back_s * self.sync,
            parity_check_s=costs.parity_check_s * self.sync,
            other_s=self.other_s,
            of_idle=True,
        )
        return simulated, costs


def _read_config(run_dir: Path) -> Config:
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ValueError(
            f"simulate.calibration={run_dir}: no config.yaml there; give the run.dir of an"
            " `mcore-rl train` run of two steps or more"
        )
    written = OmegaConf.load(path)
    assert isinstance(written, DictConfig)
    if "canary" in written:
        _log.warning("%s: canary is read as parity_check, its name since version 0.2.0", path)
        written["parity_check"] = written.pop("canary")
    tree = OmegaConf.merge(OmegaConf.structured(Config), written)
    assert isinstance(tree, DictConfig)
    config = make_config(tree)
    if config.rollout.mode != "sync":
        raise ValueError(
            f"simulate.calibration={run_dir}: a run with rollout.mode={config.rollout.mode}, whose"
            " phases overlap; give one with rollout.mode=sync"
        )
    return config


def _lens(row: Mapping[str, float], longest_allowed: int) -> tuple[float, float]:
    """Return mean and spread of the log-normal lengths that a step's responses come from.

    Where some were cut at the longest that is allowed, these are of the lengths before the cut.
    """
    mean, longest = row["rollout/response_len"], row["rollout/response_len_max"]
    cut = row.get("rollout/truncated_share", 0.0)
    if 0 < cut < 1 and mean < longest_allowed:
        return _uncut(mean / longest_allowed, cut, longest_allowed)
    if longest <= mean:
        return mean, 0.0
    # The longest of N: exp(center + spread * z), with center = log(mean) - spread^2 / 2.
    z = NormalDist().inv_cdf(1 - 1 / (row["rollout/samples"] + 1))
    ratio = math.log(longest / mean)
    return mean, z - math.sqrt(max(z * z - 2 * ratio, 0.0))


def _uncut(mean: float, cut: float, longest: int) -> tuple[float, float]:
    """Return mean and spread of lengths of which a share is `cut` at `longest` tokens.

    mean   of the cut lengths, as a share of `longest`
    """
    normal = NormalDist()
    z = normal.inv_cdf(cut)
    low, high = 0.0, WIDEST
    # With center = log(longest) + spread * z, a wider spread makes the lengths below the cut, and
    # so their mean, shorter.
    for _ in range(50):
        spread = (low + high) / 2
        below = math.exp(z * spread + spread**2 / 2) * normal.cdf(-z - spread)
        if below + cut > mean:
            low = spread
        else:
            high = spread
    return longest * math.exp(z * low + low**2 / 2), low


def _prompt_len(row: Mapping[str, float], epochs: int, longest: int) -> int:
    """Return the mean tokens of a prompt of a step, from those that the step trained on."""
    per_sample = row["train/tokens"] / epochs / row["rollout/samples"]
    prompt_len = round(per_sample - row["rollout/response_len"])
    return min(max(prompt_len, 1), longest)


def _factor(measured: Mapping[str, float], predicted: Mapping[str, float], phase: str) -> float:
    if measured[phase] < LEAST_S or predicted[phase] < LEAST_S:
        return 1.0
    return measured[phase] / predicted[phase]


def _passes_s(predicted: Mapping[str, float]) -> float:
    """Return the seconds of forward passes, which the simulation has where the recipe has them."""
    return predicted["logprobs"] if predicted["logprobs"] >= LEAST_S else 0.0

"""A step of GRPO for each family: Megatron in several layouts, real SGLang engines.

The weights that engines must hold are gathered by Megatron alone.
"""

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_rl.batches.batch import split_by_lens
from mcore_rl.batches.stored_batch import make_stored_batch
from mcore_rl.rollout.engine import EngineProcess
from tests.support import models_table
from tests.support.ahead import StartedAhead, chosen_cases
from tests.support.megatron_ranks import MegatronRanks, hf_weights_of
from tests.support.megatron_run import MegatronRun, make_config, start_engines
from tests.support.sync_stage import (
    checksums,
    checksums_after_loading,
    generate,
    logprob_error,
)
from tests.support.tiny_models import MODELS, write_model
from tests.support.tiny_training import transformers_logprobs

pytestmark = pytest.mark.e2e

Layout = dict[str, int]
TOLERANCE = 1e-4
MOE_LAYOUTS: list[Layout] = [
    {"tp": 2, "pp": 2, "ep": 2},
    {"tp": 2, "ep": 2, "etp": 2},
    {"pp": 2, "vpp": 2, "ep": 2},
]
DENSE_LAYOUTS: list[Layout] = [{"tp": 4}, {"tp": 2, "pp": 2, "vpp": 2}]
LAYOUTS = {
    "qwen3": DENSE_LAYOUTS,
    "qwen2": DENSE_LAYOUTS[:1],
    "llama": DENSE_LAYOUTS[1:],
    "qwen3_5": DENSE_LAYOUTS[:1],
    "mixtral": MOE_LAYOUTS[1:2],
    "glm4_moe": MOE_LAYOUTS[1:2],
    "olmoe": MOE_LAYOUTS[2:],
    "kimi_k2": MOE_LAYOUTS[2:],
    "glm4_moe_lite": MOE_LAYOUTS[1:2],
    "hunyuan_v3": MOE_LAYOUTS[2:],
    "glm5": MOE_LAYOUTS[2:],
    "nemotron3_latent": MOE_LAYOUTS[1:2],
}
"""Layouts of the trainer, one after the other; the first of MOE_LAYOUTS for families not listed."""

AHEAD = 2
"""How many cases' engines start ahead, while the case before them runs."""
Engine = tuple[Layout, str]
"""An engine's sizes, and how its ranks and the trainer's come to their layouts.

SGLang on CPU cuts the 96 rows of a dense MLP into 64 and 32. That is not recorded, so those ranks
list their shards.
"""
ONE_RANK: Engine = ({}, "recorded")
CUT, UNEVEN = ({"tp": 2, "ep": 2}, "recorded"), ({"tp": 2, "ep": 2}, "listed")
DENSE: Engine = ({"tp": 2}, "listed")
IN_EVERY_RUN = ("deepseek_v3",)
"""Cases of `make test`: latent attention with experts."""
BY_FAMILY: dict[str, list[Engine]] = {
    **{kind: [ONE_RANK] for kind in MODELS},
    "qwen3": [ONE_RANK, DENSE],
}
IN_EVERY_LAYOUT: dict[str, list[Engine]] = {
    "qwen3_moe": [ONE_RANK, CUT],
    "deepseek_v3": [ONE_RANK, UNEVEN],
}
DELTA_NETS = ("qwen3_next", "qwen3_5_moe")
PIPELINE: Layout = {"pp": 2}
DATA_PARALLEL: Layout = {"tp": 2, "ep": 2, "attention_dp": 2}
SLOW: dict[str, list[Engine]] = {
    "qwen3_moe": [(PIPELINE, "recorded"), (DATA_PARALLEL, "recorded")],
    "deepseek_v3": [(PIPELINE, "recorded"), (DATA_PARALLEL, "listed")],
    **{kind: [CUT] for kind in ("qwen2_moe", "mixtral", "minimax_m2", *DELTA_NETS)},
    **{
        kind: [UNEVEN]
        for kind in (
            *("deepseek_v2", "glm4_moe", "moonlight", "kimi_k2", "glm4_moe_lite", "glm5"),
            "hunyuan_v3",
        )
    },
    "deepseek_v32": [UNEVEN, (DATA_PARALLEL, "listed")],
    **{kind: [DENSE] for kind in ("qwen2", "llama", "qwen3_5")},
    "gpt_oss": [({"tp": 2}, "recorded")],
    "nemotron3": [UNEVEN, (PIPELINE, "recorded")],
    "nemotron3_latent": [CUT],
}
"""Engines of several ranks. OLMoE is missing, because its engines have one."""


@dataclass(frozen=True)
class Case:
    """A family, the trainer's layouts, one after the other, and the engines."""

    kind: str
    layouts: list[Layout]
    engines: list[Engine]

    @property
    def routed_experts(self) -> bool:
        """Whether engines report routed experts: pipeline stages after the first do not."""
        return not any("pp" in sizes for sizes, _ in self.engines)


CASES = {
    **{
        kind: Case(kind, LAYOUTS.get(kind, MOE_LAYOUTS[:1]), engines)
        for kind, engines in BY_FAMILY.items()
    },
    **{
        f"{kind}-layouts": Case(kind, MOE_LAYOUTS, engines)
        for kind, engines in IN_EVERY_LAYOUT.items()
    },
    **{
        f"{kind}-cut": Case(kind, LAYOUTS.get(kind, MOE_LAYOUTS)[:1], engines)
        for kind, engines in SLOW.items()
    },
}


class Started:
    """A model for each layout, and engines that hold the last of them."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.folder = folder
        self.hf_dirs = [
            write_model(case.kind, folder / str(seed), seed) for seed in range(len(case.layouts))
        ]
        config = make_config(self.hf_dirs[-1], {}, routed_experts=case.routed_experts)
        self.engines = start_engines(config, folder, [sizes for sizes, _ in case.engines])
        self._starting = list(self.engines)

    def wait_healthy(self) -> None:
        while self._starting:
            self._starting[0].wait_healthy()
            del self._starting[0]

    def stop(self) -> None:
        for engine in self.engines:
            engine.stop()


@pytest.fixture(scope="module")
def ahead(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartedAhead[Started]]:
    folder = tmp_path_factory.mktemp("families")
    ahead = StartedAhead(
        chosen_cases(request), lambda case: Started(CASES[case], folder / case), AHEAD
    )
    yield ahead
    for started in ahead.started.values():
        started.stop()


@pytest.fixture
def ranks() -> Iterator[MegatronRanks]:
    """New ranks for each case, because a step leaves the threads of its process groups behind."""
    ranks = MegatronRanks(4)
    yield ranks
    ranks.stop()


def gather(run: MegatronRun, step: int, hf_dir: Path) -> Path:
    """An HF directory of the run's checkpoint, made without `mcore_rl.weights`."""
    config = json.loads((hf_dir / "config.json").read_text())
    gathered = run.folder.path / "gathered"
    gathered.mkdir()
    shutil.copy(hf_dir / "config.json", gathered)
    weights = hf_weights_of(run.folder.checkpoint(step), config)
    before = load_file(hf_dir / "model.safetensors")
    assert weights.keys() == before.keys()
    same = {name for name in before if torch.equal(weights[name], before[name])}
    experts = {name.rsplit(".", 2)[0] for name in same if ".experts." in name}
    matrices = 2 if "mamba_num_heads" in config else 3
    assert len(same) == matrices * len(experts), same
    assert len(experts) <= 2, same  # to which no token went
    save_file(weights, gathered / "model.safetensors", metadata={"format": "pt"})
    return gathered


def check_step(run: MegatronRun, gathered: Path) -> float:
    """Check the step and return the largest difference between engines' and trainer's log-probs.

    After the step the trainer's log-probs are those of transformers, and responses with more reward
    have become likelier.
    """
    metrics = run.log.metrics
    assert metrics["loss/grad_norm"] > 0 == metrics["logprob_diff/stale_share"]
    assert metrics.get("logprob_diff/router_flip_share", 0.0) == 0
    assert 0 < metrics["sync/parity_diff"] < TOLERANCE
    samples = run.log.samples
    batch = replace(run.stores.assemble(make_stored_batch(samples)), routed_experts_TLK=None)
    after_T = run.trainer.compute_logprobs(batch).logprobs_T
    assert (after_T - transformers_logprobs(gathered, batches=[batch])[0]).abs().max() < TOLERANCE
    assert batch.rollout_logprobs_T is not None
    gains_T = (after_T - batch.rollout_logprobs_T).masked_fill(~batch.loss_mask_T, 0.0)
    gains_N = torch.stack([part.sum() for part in split_by_lens(gains_T, batch.lens_N)])
    size = run.config.rollout.samples_per_prompt
    advantages_PG = torch.tensor(run.log.scores.rewards_N).view(-1, size)
    advantages_PG = advantages_PG - advantages_PG.mean(1, keepdim=True)
    assert (advantages_PG.flatten() * gains_N).sum() > 0
    return metrics["logprob_diff/token_max"]


def check_engine(engine: EngineProcess, hf_dir: Path, gathered: Path) -> float:
    """Check what an engine holds; return how far its log-probs are from those of transformers."""
    answer = generate(engine.url)
    error = logprob_error(gathered, answer)
    assert error < TOLERANCE < logprob_error(hf_dir, answer)
    found = checksums(engine.url)
    assert found == checksums_after_loading(engine.url, gathered), engine.spec
    return error


def train_and_check(
    ranks: MegatronRanks,
    started: Started,
    case: Case,
    layout: Layout,
    hf_dir: Path,
    start_step: int,
) -> None:
    config = make_config(hf_dir, layout, start_step + 1, routed_experts=case.routed_experts)
    ranks.build(config)
    started.wait_healthy()
    folder = started.folder / f"run{start_step}"
    loaded = start_step == 0 and hf_dir == started.hf_dirs[-1]
    with MegatronRun(config, ranks, started.engines, folder, loaded=loaded) as run:
        run.train(start_step)
        agreed = [
            run.sync_controller.get_agreed_layouts(engine.url).split()[0]
            for engine in started.engines
        ]
        assert agreed == [how for _, how in case.engines]
        gathered = gather(run, start_step + 1, hf_dir)
        difference = check_step(run, gathered)
        assert difference < TOLERANCE
        for engine, (sizes, _) in zip(started.engines, case.engines, strict=True):
            error = check_engine(engine, hf_dir, gathered)
            models_table.record(case.kind, models_table.SGLANG, sizes, error)
            models_table.record(case.kind, models_table.RUN, sizes, difference)


def check_listing(ranks: MegatronRanks, started: Started, version: int) -> None:
    """Link anew with the layouts of another recipe: shards are listed, and nothing changes."""
    engines = started.engines
    urls = [engine.url for engine in engines]
    before = [checksums(url) for url in urls]
    config = make_config(started.hf_dirs[-1], {"pp": 4})
    with MegatronRun(config, ranks, engines, started.folder / "listing") as run:
        asyncio.run(run.sync_controller.connect(urls))
        assert not asyncio.run(run.sync_controller.sync(version)).failed
        assert {run.sync_controller.get_agreed_layouts(url).split()[0] for url in urls} == {
            "listed"
        }
    assert [checksums(engine.url) for engine in engines] == before


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow) for name in CASES],
)
def test_engines_sample_megatron_learns_and_engines_hold_what_it_holds(
    ranks: MegatronRanks, ahead: StartedAhead[Started], case: str
) -> None:
    started, layouts = ahead.take(case), CASES[case].layouts
    try:
        for i, (hf_dir, layout) in enumerate(zip(started.hf_dirs, layouts, strict=True)):
            train_and_check(ranks, started, CASES[case], layout, hf_dir, 2 * i)
        check_listing(ranks, started, 2 * len(layouts))
    finally:
        started.stop()

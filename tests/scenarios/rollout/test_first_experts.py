"""Experts that train are those that drew: what an engine computes again changes none of them.

transformers computes which experts each token goes to with the weights that drew the next one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from mcore_rl.agents.recorder import EpisodeRecorder
from mcore_rl.rollout.engine import FORKS
from mcore_rl.rollout.request import RoutedExpertsShape
from mcore_rl.types import Sample
from tests.scenarios.agents.test_versions import (
    EXPERTS,
    play_while_weights_change,
    rows_of,
    swapped_engine,
)
from tests.scenarios.rollout.test_moved_responses import draw_with_moves
from tests.support.engines import serve_versions
from tests.support.tiny_models import write_model

pytestmark = pytest.mark.e2e

TOP_K = 2
SHAPE = RoutedExpertsShape((True, True), TOP_K, EXPERTS)
CLOSE = 1e-4
"""Experts whose router logits differ by less may be exchanged by rounding."""


class Router:
    """The experts of one version's weights, by transformers."""

    def __init__(self, weights: Path) -> None:
        self._model = Qwen3MoeForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()

    @torch.no_grad()
    def __call__(self, token_ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the chosen experts, [T, L, K] in order, and whether they are certain, [T, L]."""
        ids = torch.from_numpy(token_ids.astype(np.int64))[None]
        logits_L = self._model(ids, output_router_logits=True).router_logits
        logits_TLE = torch.stack([logits.reshape(ids.shape[1], -1) for logits in logits_L], 1)
        values, experts = logits_TLE.topk(TOP_K + 1)
        certain_TL = values[..., TOP_K - 1] - values[..., TOP_K] > CLOSE
        return experts[..., :TOP_K].sort().values, certain_TL


@dataclass
class Reported:
    """Tokens, the version that drew each of them (-1: none), and the choices reported of them."""

    token_ids_T: np.ndarray
    version_T: np.ndarray
    choices_TLK: torch.Tensor

    def next_versions(self) -> list[int]:
        """Return the version that drew the token after each but the last; a prompt has its first
        answer's.
        """
        version_T = self.version_T.copy()
        for t in range(len(version_T) - 2, -1, -1):
            version_T[t] = version_T[t] if version_T[t] >= 0 else version_T[t + 1]
        return version_T[1:].tolist()


def share_of_wrong(of_version: Callable[[int], Router], all_reported: list[Reported]) -> Any:
    """Return shares of choices that other weights made than expected.

    first   expected are the weights that drew the next token
    last    expected are the weights that drew the last one: what engines report by themselves
    """
    num_wrong = {"first": 0, "last": 0}
    num_choices = 0
    for reported in all_reported:
        drawn_by = reported.next_versions()
        chosen = {v: of_version(v)(reported.token_ids_T) for v in set(drawn_by)}
        own_TLK = reported.choices_TLK.sort().values
        for how, of_T in (("first", drawn_by), ("last", drawn_by[-1:] * len(own_TLK))):
            want_TLK = torch.stack([chosen[v][0][t] for t, v in enumerate(of_T)])
            sure_TL = torch.stack([chosen[v][1][t] for t, v in enumerate(of_T)])
            num_wrong[how] += int(((want_TLK != own_TLK).any(-1) & sure_TL).sum())
        num_choices += own_TLK[..., 0].numel()
    return {how: number / num_choices for how, number in num_wrong.items()}


def reported_of_rows(episodes: list[EpisodeRecorder]) -> list[Reported]:
    """Return what was reported of the rows that train; versions are of all answers in them."""
    found = []
    for episode in episodes:
        tree = episode.tree
        paths = {tree.path_ids(turn.number): tree.path(turn.number) for turn in tree.turns}
        for row in rows_of([episode]):
            assert row.routed_experts is not None
            version_T = np.full(len(row.token_ids), -1)
            end = 0
            for turn in paths[tuple(row.token_ids.tolist())]:
                start = end + len(turn.context_ids)
                end = start + len(turn.token_ids)
                for span in turn.versions:
                    version_T[start + span.start : start + span.stop] = span.version
            found.append(Reported(row.token_ids, version_T, row.routed_experts))
    return found


def reported_of_sample(sample: Sample, name: str = "routed_experts") -> Reported:
    token_ids = (*sample.prompt.token_ids, *sample.response_ids)
    version_T = np.full(len(token_ids), -1)
    for span in sample.versions:
        start = len(sample.prompt.token_ids) + span.start
        version_T[start : start + span.stop - span.start] = span.version
    return Reported(np.array(token_ids), version_T, getattr(sample, name))


@pytest.mark.slow
def test_tokens_keep_the_experts_that_drew_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights change inside answers and between turns, and requests are retracted meanwhile.

    SGLang retracts requests at every seventh pass, as if its KV cache were full.
    """
    monkeypatch.delenv(FORKS, raising=False)
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "7")
    with swapped_engine(tmp_path, TOP_K, routed_experts=True) as swapped:
        episodes = play_while_weights_change(swapped, 24, seed=1, shape=SHAPE)
        routers = [Router(weights) for weights in swapped.weights]
        wrong = share_of_wrong(
            lambda version: routers[swapped.weights_of(version)], reported_of_rows(episodes)
        )
        log = Path(swapped.engine.spec.log_path).read_text()
    num_retracted = log.count("Testing retraction")
    print(f"{swapped.version} syncs, {num_retracted} retractions, wrong: {wrong}")
    assert num_retracted > 10 and swapped.version > 3  # how many fit depends on the machine
    assert wrong["first"] == 0 and wrong["last"] > 0.1


def test_a_response_keeps_the_experts_of_the_engine_that_it_left(tmp_path: Path) -> None:
    """The two engines serve other weights, so each routes the same tokens otherwise."""
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "num_hidden_layers": 2}
    sizes |= {"vocab_size": 320, "max_position_embeddings": 2048}
    paths = {n: write_model("qwen3_moe", tmp_path / str(n), n, **sizes) for n in (7, 8)}
    with serve_versions(paths, tmp_path, routed_experts=True) as engines:
        samples, num_moved = draw_with_moves(engines, SHAPE)
    routers = {n: Router(path) for n, path in paths.items()}
    moved = [sample for sample in samples if len(sample.versions) == 2]
    assert num_moved >= 1 and moved
    wrong = share_of_wrong(routers.__getitem__, [reported_of_sample(sample) for sample in moved])
    assert wrong["first"] == 0 and wrong["last"] > 0.01

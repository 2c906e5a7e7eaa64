"""The stand-in engine takes HF tensors into transformers' parameters, and cuts responses."""

import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

from mcore_rl.batches.local_stores import LocalStores
from mcore_rl.tools.doctor.lone_rank import qwen3_moe
from mcore_rl.tools.doctor.step_checks import StandInEngine, _cut_at_end, load_weights
from mcore_rl.types import Prompt


def test_experts_are_stacked_and_others_copied() -> None:
    experts = "model.layers.0.mlp.experts"
    parameters = {
        "model.norm.weight": nn.Parameter(torch.zeros(2)),
        f"{experts}.gate_up_proj": nn.Parameter(torch.zeros(2, 4, 3)),
        f"{experts}.down_proj": nn.Parameter(torch.zeros(2, 3, 2)),
    }
    weights = {
        "model.norm.weight": torch.ones(2),
        f"{experts}.1.gate_proj.weight": torch.full((2, 3), 2.0),
        f"{experts}.1.up_proj.weight": torch.full((2, 3), 3.0),
        f"{experts}.0.down_proj.weight": torch.full((3, 2), 4.0),
    }
    load_weights(parameters, weights.items())
    assert parameters["model.norm.weight"].tolist() == [1, 1]
    gate_up = parameters[f"{experts}.gate_up_proj"]
    assert not gate_up[0].any() and gate_up[1].tolist() == [[2] * 3] * 2 + [[3] * 3] * 2
    assert (parameters[f"{experts}.down_proj"][0] == 4).all()


def test_a_response_ends_with_its_end_token() -> None:
    assert _cut_at_end([5, 1, 7], [0.5, 0.25, 0.125], 1) == ((5, 1), (0.5, 0.25), True)
    assert _cut_at_end([5, 6], [0.5, 0.25], 1) == ((5, 6), (0.5, 0.25), False)


def test_samples_have_the_log_probs_that_it_scores(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(qwen3_moe()))
    prompt = Prompt(0, (5, 9, 11), (), "random", None)
    stores = LocalStores()
    with closing(StandInEngine(tmp_path, "float32", 60.0, stores)) as engine:
        samples = stores.samples(engine.generate([prompt], 2, greedy=False, seed=3))
        again = stores.samples(engine.generate([prompt], 2, greedy=False, seed=3))
        assert [sample.response_ids for sample in samples] == [s.response_ids for s in again]
        for sample in samples:
            [scored] = engine.score([[*prompt.token_ids, *sample.response_ids]])
            own = torch.tensor(sample.logprobs)
            torch.testing.assert_close(torch.tensor(scored)[2:], own, rtol=0, atol=1e-5)
        with pytest.raises(RuntimeError, match="the stand-in engine raised"):
            engine.score([["no token"]])  # type: ignore[list-item]

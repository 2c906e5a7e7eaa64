"""A vision-language model computes what transformers does, in every layout, gradients included."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.types import LogprobOptions
from mcore_rl.weights.hf.config import read_hf_config
from mcore_rl.weights.layouts.megatron import MegatronLayout, MegatronSizes
from mcore_rl.weights.models import family_of
from tests.support.distributed import run_each, run_ranks
from tests.support.exact_gradients import compute_exact_gradients
from tests.support.gradients import boxed_gradients, check_gradients
from tests.support.tiny_glm4v import write_glm4v_model
from tests.support.tiny_kimi_vl import write_kimi_k25_model, write_kimi_vl_model
from tests.support.tiny_qwen3_vl import (
    write_qwen3_5_model,
    write_qwen3_5_moe_model,
    write_qwen3_vl_model,
    write_qwen3_vl_moe_model,
)
from tests.support.tiny_training import make_actor, my_batches, token_loss
from tests.support.tiny_vision import (
    batches_of,
    load_vision_model,
    num_tokens,
    transformers_vision_logprobs,
    write_vision_model,
)

Layout = dict[str, Any]
TWO_RANKS: list[Layout] = [{"tp": 2}, {"cp": 2}]
MORE_TWO_RANKS: list[Layout] = [{"pp": 2}, {"dp": 2}, {"pp": 2, "vpp": 2}]
FOUR_RANKS: list[Layout] = [{"tp": 2, "pp": 2}, {"tp": 2, "cp": 2}]
EXPERTS: list[Layout] = [{"tp": 2, "ep": 2}, {"pp": 2}, {"dp": 2, "ep": 2}, {"tp": 2, "etp": 2}]
LATENT: list[Layout] = [{"tp": 2, "ep": 2}, {"pp": 2}, {"cp": 2}]
LATENT_FOUR: list[Layout] = [{"tp": 2, "pp": 2}, {"tp": 2, "cp": 2}, {"dp": 4, "ep": 2}]
# The first 3 layers of Qwen3-VL take features of the tower's inner blocks.
STAGES: Layout = {"pp": 2, "stage_layers": [3, 1]}
APART: Layout = {"pp": 2, "stage_layers": [1, 3]}
CHUNKS: Layout = {"pp": 2, "vpp": 2}
RECOMPUTED: Layout = {"tp": 2, "recompute": "full"}
WRITERS = {
    "qwen2_5_vl": write_vision_model,
    "glm4v_moe": write_glm4v_model,
    "kimi_vl": write_kimi_vl_model,
    "kimi_k25": write_kimi_k25_model,
    "qwen3_vl": write_qwen3_vl_model,
    "qwen3_vl_moe": write_qwen3_vl_moe_model,
    "qwen3_5": write_qwen3_5_model,
    "qwen3_5_moe": write_qwen3_5_moe_model,
    "qwen3_vl_tied": partial(write_qwen3_vl_model, num_hidden_layers=6, tie_word_embeddings=True),
}
SLOW = pytest.mark.slow
QUICK = ("qwen2_5_vl", "qwen3_vl")
KINDS = [pytest.param(kind, marks=() if kind in QUICK else SLOW) for kind in WRITERS]
CASES = [
    pytest.param("qwen2_5_vl", TWO_RANKS, id="qwen2_5_vl-two_ranks"),
    pytest.param("qwen2_5_vl", MORE_TWO_RANKS, id="qwen2_5_vl-more_two_ranks", marks=SLOW),
    pytest.param("qwen2_5_vl", FOUR_RANKS, id="qwen2_5_vl-four_ranks", marks=SLOW),
    pytest.param("glm4v_moe", EXPERTS, id="glm4v_moe", marks=SLOW),
    pytest.param("kimi_vl", LATENT[:1], id="kimi_vl", marks=SLOW),
    pytest.param("kimi_vl", LATENT[1:], id="kimi_vl-two_ranks", marks=SLOW),
    pytest.param("kimi_vl", LATENT_FOUR, id="kimi_vl-four_ranks", marks=SLOW),
    pytest.param("kimi_k25", [{"tp": 2, "ep": 2}, {"pp": 2, "vpp": 2}], id="kimi_k25", marks=SLOW),
    pytest.param("kimi_k25", [{"tp": 2, "etp": 2}, {"cp": 2}], id="kimi_k25-two_ranks", marks=SLOW),
    pytest.param("kimi_k25", LATENT_FOUR, id="kimi_k25-four_ranks", marks=SLOW),
    pytest.param("qwen3_vl", [RECOMPUTED], id="qwen3_vl", marks=SLOW),
    pytest.param("qwen3_vl", [APART], id="qwen3_vl-features_travel"),
    pytest.param(
        "qwen3_vl",
        [{**APART, "recompute": "full"}, CHUNKS, {"pp": 2}],
        id="qwen3_vl-features_travel_far",
        marks=SLOW,
    ),
    pytest.param(
        "qwen3_vl",
        [{"pp": 4}, {"tp": 2, **APART}, {"cp": 2, **APART}, {"dp": 2, **APART}],
        id="qwen3_vl-features_travel_on_four_ranks",
        marks=SLOW,
    ),
    pytest.param(
        "qwen3_vl", [{"tp": 2}, STAGES, {"cp": 2}, {"dp": 2}], id="qwen3_vl-two_ranks", marks=SLOW
    ),
    pytest.param(
        "qwen3_vl", [{"tp": 2, **STAGES}, {"tp": 2, "cp": 2}], id="qwen3_vl-four_ranks", marks=SLOW
    ),
    pytest.param(
        "qwen3_vl_tied",
        [{"pp": 2, "vpp": 2, "stage_layers": [3, 1, 1, 1]}, {"pp": 2, "stage_layers": [4, 2]}],
        id="qwen3_vl_tied",
        marks=SLOW,
    ),
    pytest.param(
        "qwen3_vl_moe",
        [{"dp": 2, "ep": 2}, {"tp": 2, "etp": 2}, {"tp": 2, "ep": 2, "recompute": "full"}, STAGES],
        id="qwen3_vl_moe-two_ranks",
        marks=SLOW,
    ),
    pytest.param(
        "qwen3_vl_moe",
        [{"tp": 2, "ep": 2, **STAGES}, {"tp": 2, "cp": 2, "ep": 2}],
        id="qwen3_vl_moe-four_ranks",
        marks=SLOW,
    ),
    pytest.param(
        "qwen3_5",
        [{"tp": 2, "recompute": "full"}, {"pp": 2, "vpp": 2}, {"cp": 2}, {"dp": 2}],
        id="qwen3_5-two_ranks",
        marks=SLOW,
    ),
    pytest.param(
        "qwen3_5_moe",
        [{"tp": 2, "ep": 2}, {"tp": 2, "etp": 2}, {"pp": 2}, {"dp": 2, "ep": 2}],
        id="qwen3_5_moe-two_ranks",
        marks=SLOW,
    ),
    pytest.param(
        "qwen3_5_moe",
        [{"tp": 2, "pp": 2, "ep": 2}, {"tp": 2, "cp": 2, "ep": 2}],
        id="qwen3_5_moe-four_ranks",
        marks=SLOW,
    ),
]
SCALE = 0.8
TOLERANCE = 2e-6
"""Share of the largest gradient. Rounding to float32 alone is about 1e-6 of it, by the CPU."""
DELTA_NETS = ("qwen3_5", "qwen3_5_moe")
OF_DELTA_NETS = 8e-6
"""The same with gated delta nets: there, transformers in float32 is 4.3e-6 away from float64."""


def parallel_of(layout: Layout) -> ParallelConfig:
    return ParallelConfig(**{key: layout[key] for key in layout if key != "recompute"})


def run_layout(
    rank: int, world_size: int, port: int, model: ModelConfig, layout: Layout
) -> dict[str, Any]:
    """Score, export and take a step in a layout; return this rank's reports and gradients."""
    from megatron.core import parallel_state as ps

    actor = make_actor(
        rank,
        world_size,
        port,
        model,
        parallel_of(layout),
        router_aux_loss_coef=0.0,
        recompute=layout.get("recompute", "none"),
    )
    batches = batches_of(model.path)
    mine = my_batches(batches)
    scores = actor.compute_logprobs(mine, LogprobOptions(temperature=SCALE))
    shards, _ = actor.weight_layout()
    name = "-".join(f"{key}{value}" for key, value in layout.items()) or "whole"
    actor.export_hf(Path(model.path) / f"export-{name}")
    stats = actor.train_step(mine, token_loss, temperature=SCALE, num_tokens=num_tokens(batches))
    return {
        "dp": ps.get_data_parallel_rank(),
        "stats": stats,
        "logprobs": scores and [score.logprobs_T for score in scores],
        "boxes": [shard.box for shard in shards],
        "gradients": boxed_gradients(actor),
    }


@dataclass(frozen=True)
class Single:
    """A model directory, what one process reported of it, and the gradients in float64."""

    folder: Path
    report: dict[str, Any]
    exact: dict[str, Tensor]


@pytest.fixture(scope="module")
def singles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Single]:
    @cache
    def of_kind(kind: str) -> Single:
        folder = WRITERS[kind](tmp_path_factory.mktemp(kind))
        [report] = run_ranks(run_layout, 1, ModelConfig(path=str(folder)), {})
        exact = compute_exact_gradients(load_vision_model(folder), batches_of(folder), SCALE)
        return Single(folder, report, exact)

    return of_kind


Singles = Callable[[str], Single]


@pytest.mark.gloo
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_computes_what_transformers_does(singles: Singles, kind: str) -> None:
    folder, one_process = singles(kind).folder, singles(kind).report
    model = load_vision_model(folder)
    with torch.no_grad():
        wanted = transformers_vision_logprobs(model, batches_of(folder), SCALE)
    for got, want in zip(one_process["logprobs"], wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    exact = singles(kind).exact
    patches = next(name for name in exact if name.endswith("patch_embed.proj.weight"))
    assert exact[patches].abs().max() > 0
    gradients = [one_process["gradients"]]
    is_delta_net = kind in DELTA_NETS
    check_gradients(gradients, exact, "one process", OF_DELTA_NETS if is_delta_net else TOLERANCE)


@pytest.mark.gloo
@pytest.mark.parametrize(("kind", "layouts"), CASES)
def test_layouts_agree_with_one_process(singles: Singles, kind: str, layouts: list[Layout]) -> None:
    folder, one_process = singles(kind).folder, singles(kind).report
    exact, is_delta_net = singles(kind).exact, kind in DELTA_NETS
    world_size = parallel_of(layouts[0]).world_size
    model = ModelConfig(path=str(folder))
    per_layout = run_each(run_layout, world_size, layouts, model, timeout_s=300.0)
    for layout, ranks in zip(layouts, per_layout, strict=True):
        gradients = [rank["gradients"] for rank in ranks]
        check_gradients(gradients, exact, layout, OF_DELTA_NETS if is_delta_net else TOLERANCE)
        owners = {rank["dp"]: rank for rank in ranks if rank["stats"] is not None}
        assert len(owners) == parallel_of(layout).dp_size, layout
        for dp, owner in owners.items():
            step = one_process["stats"]
            assert owner["stats"].loss == pytest.approx(step.loss, abs=1e-6), layout
            assert owner["stats"].grad_norm == pytest.approx(step.grad_norm, rel=1e-6), layout
            expected = one_process["logprobs"][dp :: len(owners)]
            for got, want in zip(owner["logprobs"], expected, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=3e-6)
        check_boxes(folder, layout, ranks)


def check_boxes(folder: Path, layout: Layout, ranks: list[dict[str, Any]]) -> None:
    """Check that the elements read off Megatron are those that the layout computes."""
    config = read_hf_config(folder)
    sizes = MegatronSizes.from_config(parallel_of(layout), config)
    shapes = family_of(config).shapes(config)
    computed = MegatronLayout(family_of(config), config, sizes, "float32")
    for number, rank in enumerate(ranks):
        found = [(box.name, box.start, box.stop) for box in rank["boxes"]]
        wanted = [
            (name, piece.start, piece.stop)
            for name in computed.names(number)
            for piece in computed.placement(name).pieces
            if number in piece.ranks
        ]
        held, expected = held_elements(found, shapes), held_elements(wanted, shapes)
        assert held.keys() == expected.keys(), layout
        assert all(torch.equal(held[name], expected[name]) for name in held), layout


def held_elements(boxes: list[Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return HF name -> how many of the boxes hold each element."""
    held: dict[str, Tensor] = {}
    for name, start, stop in boxes:
        counts = held.setdefault(name, torch.zeros(shapes[name], dtype=torch.int64))
        counts[tuple(map(slice, start, stop))] += 1
    return held


@pytest.mark.gloo
@pytest.mark.parametrize("kind", KINDS)
def test_weights_come_back_byte_for_byte(singles: Singles, kind: str) -> None:
    folder = singles(kind).folder
    source = load_file(folder / "model.safetensors")
    exports = sorted(folder.glob("export-*"))
    assert exports
    for export in exports:
        exported: dict[str, Tensor] = {}
        for file in export.glob("*.safetensors"):
            exported |= load_file(file)
        assert exported.keys() == source.keys()
        assert all(torch.equal(exported[name], tensor) for name, tensor in source.items())
        load_vision_model(export)

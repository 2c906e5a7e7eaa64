"""bfloat16 Megatron ranks to the FP8 parameters of SGLang's own models, byte for byte.

For comparison SGLang itself loads an FP8 checkpoint, made by DeepSeek's formula from weights that
Megatron gathered.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mcore_rl.config import (
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    TrainConfig,
)
from mcore_rl.planning.deployment import record_layouts
from mcore_rl.weight_sync.link_store import LinkStore
from mcore_rl.weight_sync.wire import Link
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from tests.support.engine_ranks import EngineRanks
from tests.support.fp8_oracle import dequantize, per_block_cast_to_fp8
from tests.support.megatron_ranks import MegatronRanks, hf_weights_of
from tests.support.tiny_models import write_model
from tests.support.tiny_training import NUM_TOKENS, make_batches

pytestmark = pytest.mark.gloo

TIMEOUT_S = 60.0
ENGINE = {"tp": 2, "ep": 2}
LAYOUT = {"tp": 2, "pp": 2, "ep": 2}
LAYOUTS = {"qwen3": {"tp": 2, "pp": 2}, "deepseek_v32": {"pp": 2, "cp": 2, "ep": 2}}
BIG = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **BIG,
        "head_dim": 64,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 256,
        "num_experts": 4,
    },
    "deepseek_v3": {
        **BIG,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "moe_intermediate_size": 256,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
    },
    "qwen3": {**BIG, "head_dim": 64, "num_key_value_heads": 4},
}
MODELS["deepseek_v32"] = MODELS["deepseek_v3"] | {"index_head_dim": 128, "index_n_heads": 4}
"""Heads have 64 rows, two to a block. DeepSeek's kv_a_proj_with_mqa has 192, a block and a half."""

NOT_CONVERTED = {"qwen3": ["model.layers.1.self_attn.o_proj", "model.layers.0.mlp.down_proj"]}
"""Modules that config.json leaves in bfloat16. They are not recorded, so ranks list their shards.
"""
NUM_FP8 = {"qwen3_moe": 2 * 4, "deepseek_v3": 2 * 4 + 2 + 4, "qwen3": 2 * 4 - 2}
NUM_FP8["deepseek_v32"] = NUM_FP8["deepseek_v3"] + 2 * 2
"""FP8 parameters of a rank: four per layer; more with latent attention, shared experts, indexers.
"""

FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
PROJECTION = re.compile(
    r".*\.((self_attn|mlp|shared_experts|experts\.\d+)\.\w+_proj(_with_mqa)?"
    r"|indexer\.(wq_b|wk))\.weight"
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[MegatronRanks]:
    ranks = MegatronRanks(4)
    yield ranks
    ranks.stop()


def make_dirs(kind: str, folder: Path) -> tuple[Path, Path]:
    """The trainer's model directory, and config.json of the same model in FP8 for the engine."""
    hf_dir = write_model(kind, folder / "hf", num_hidden_layers=2, **MODELS[kind])
    fp8_dir = folder / "fp8"
    fp8_dir.mkdir()
    config = json.loads((hf_dir / "config.json").read_text())
    quantization = {**FP8_CONFIG, "modules_to_not_convert": NOT_CONVERTED.get(kind)}
    (fp8_dir / "config.json").write_text(
        json.dumps({**config, "dtype": "bfloat16", "quantization_config": quantization})
    )
    return hf_dir, fp8_dir


def quantize_gathered(
    ranks: MegatronRanks, hf_dir: Path, folder: Path, kept: Sequence[str]
) -> Path:
    """An FP8 checkpoint of the trainer's weights, made without `mcore_rl.weights`."""
    ranks.save(folder / "megatron", {})
    ranks.finish_save()
    config = json.loads((hf_dir / "config.json").read_text())
    weights = hf_weights_of(folder / "megatron", config)
    before = load_file(hf_dir / "model.safetensors")
    assert weights.keys() == before.keys()
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not PROJECTION.fullmatch(name) or name.removesuffix(".weight") in kept:
            tensors[name] = weight
            continue
        assert weight.dtype == torch.bfloat16
        is_frozen = ".indexer." in name
        assert torch.equal(weight, before[name].bfloat16()) == is_frozen
        values, scales = per_block_cast_to_fp8(weight)
        error = (dequantize(values, scales) - weight.float()).norm() / weight.float().norm()
        assert 0.01 < error < 0.04
        tensors |= {name: values, f"{name}_scale_inv": scales}
    save_file(tensors, folder / "expected.safetensors")
    return folder / "expected.safetensors"


def make_config(hf_dir: Path, layout: Mapping[str, Any]) -> Config:
    return Config(
        model=ModelConfig(path=str(hf_dir), dtype="bfloat16"),
        parallel=ParallelConfig(**layout),
        train=TrainConfig(optimizer=OptimizerConfig(lr=1e-3)),
        rollout=RolloutConfig(quantization="fp8"),
    )


def make_link(store: LinkStore, config: Config) -> Link:
    policy = ModelFacts.read(config.model.path)
    engines = SGLangSizes(tp=ENGINE["tp"], ep=ENGINE["ep"])
    recorded = record_layouts(
        policy, config.model.dtype, config.parallel, engines, quantization="fp8"
    )
    layouts = recorded.encode()
    return Link(
        *("fp8", "127.0.0.1", store.port, store.key),
        *(4, ENGINE["tp"], 1 << 16, TIMEOUT_S),
        layouts=layouts,
    )


def connect(ranks: MegatronRanks, engine: EngineRanks, link: Link) -> list[dict[str, Any]]:
    engine.ask(link=asdict(link))
    reports = [asdict(report) for report in ranks.call("connect", link)]
    return reports + engine.answers()


def errors_of(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    return [report["error"] for report in reports if report["error"] is not None]


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k != "deepseek_v3")) for k in MODELS]
)
def test_fp8_parameters_are_those_of_a_checkpoint_quantized_from_a_gather(
    ranks: MegatronRanks, tmp_path: Path, kind: str
) -> None:
    hf_dir, fp8_dir = make_dirs(kind, tmp_path)
    engine = EngineRanks(fp8_dir, ENGINE)
    try:
        layout = LAYOUTS.get(kind, LAYOUT)
        config = make_config(hf_dir, layout)
        ranks.build(config)
        ranks.train_step([make_batches()], temperature=1.0, num_tokens=NUM_TOKENS)
        expected = quantize_gathered(ranks, hf_dir, tmp_path, NOT_CONVERTED.get(kind, ()))
        stores = [LinkStore.serve("127.0.0.1", TIMEOUT_S) for _ in range(2)]
        links = [
            make_link(stores[0], config),
            replace(make_link(stores[1], config), layouts=""),
        ]
        for store, link in zip(stores, links, strict=True):
            store.keep(link)
        wanted = ["listed" if kind in NOT_CONVERTED else "recorded", "listed"]
        for version, (link, agreed) in enumerate(zip(links, wanted, strict=True), start=1):
            reports = connect(ranks, engine, link)
            assert not errors_of(reports)
            assert {report["digest"].split()[0] for report in reports} == {agreed}
            engine.ask(link=asdict(link), version=version)
            sent = ranks.call("send", version, ["fp8"], TIMEOUT_S)
            received = engine.answers()
            assert not errors_of([asdict(report["fp8"]) for report in sent] + received)
            assert sum(report["fp8"].num_bytes for report in sent) == sum(
                r["num_bytes"] for r in received
            )
        engine.ask(expected=str(expected))
        for answer in engine.answers():
            assert answer["differ"] == []
            assert answer["num_quantized"] == NUM_FP8[kind]
        if kind == "qwen3_moe":
            check_refusal(ranks, engine, hf_dir)
    finally:
        engine.stop()


def check_refusal(ranks: MegatronRanks, engine: EngineRanks, hf_dir: Path) -> None:
    """With tp=4 each rank has one of four heads of 64 rows: half a block."""
    config = make_config(hf_dir, {"tp": 4})
    ranks.build(config)
    store = LinkStore.serve("127.0.0.1", TIMEOUT_S)
    link = make_link(store, config)
    store.keep(link)
    reports = connect(ranks, engine, link)
    assert len(errors_of(reports)) == len(reports)
    assert any(
        re.search(r"source rank \d holds '.*_proj.weight' .* cuts through 128 x 128 blocks", error)
        for error in errors_of(reports)
    )

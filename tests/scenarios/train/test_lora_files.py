"""A run's adapter in PEFT's format: log-probs by PEFT's formula, the merge, and a start from it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoint_tools.cli import main
from mcore_rl.config import LoraConfig, ModelConfig, ParallelConfig
from mcore_rl.types import LogprobOptions
from mcore_rl.weights.lora.peft_files import WEIGHTS
from tests.scenarios.train.test_lora import ALPHA, RANK, SCALE, draw, named_factors
from tests.support.distributed import run_ranks
from tests.support.optimizer_layouts import read
from tests.support.tiny_training import make_actor, make_batches, my_batches, write_hf_model

LORA = LoraConfig(rank=RANK, alpha=ALPHA, experts=False)
"""Routed experts are one parameter in transformers, without modules that a hook could be put on."""


def score(actor: Any) -> list[Tensor]:
    scores = actor.compute_logprobs(my_batches(), LogprobOptions(temperature=1.0))
    return [score.logprobs_T for score in scores or []]


def save_run(rank: int, world_size: int, port: int, model: ModelConfig, root: Path) -> list[Tensor]:
    """Save a checkpoint of two tensor-parallel ranks; return their log-probs."""
    layout = ParallelConfig(tp=2)
    options: dict[str, Any] = {"lora": LORA, "router_aux_loss_coef": 0.0}
    actor = make_actor(rank, world_size, port, model, layout, **options)
    with torch.no_grad():
        for name, factor in named_factors(actor).items():
            factor.copy_(draw(name, tuple(factor.shape)))
    actor._adapter.merge()  # type: ignore[union-attr]
    actor.optimizer.reload_model_params()
    actor.save(root / "checkpoint", {})
    actor.finish_save()
    actor.export_hf(root / "export")
    return score(actor)


def start_again(
    rank: int, world_size: int, port: int, model: ModelConfig, adapter: str
) -> list[Tensor]:
    lora = LoraConfig(rank=RANK, alpha=ALPHA, experts=False, path=adapter)
    options: dict[str, Any] = {"lora": lora, "router_aux_loss_coef": 0.0}
    return score(make_actor(rank, world_size, port, model, ParallelConfig(), **options))


def score_by_hooks(model_dir: Path, adapter: Path) -> list[Tensor]:
    """Return log-probs of transformers, whose linear layers add s B (A x), as PEFT's do."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tensors = load_file(adapter / WEIGHTS)
    modules = dict(model.named_modules())
    for name in [name for name in tensors if name.endswith("lora_A.weight")]:
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        first, second = tensors[name], tensors[name.replace("lora_A", "lora_B")]

        def add(
            _: Any, inputs: Any, output: Tensor, first: Tensor = first, second: Tensor = second
        ) -> Tensor:
            return output + SCALE * (inputs[0] @ first.T) @ second.T

        modules[path].register_forward_hook(add)
    out = []
    for batch in make_batches():
        parts = []
        for ids in batch.token_ids_T.split(list(batch.lens_N)):
            with torch.no_grad():
                logits = model(ids[None]).logits[0, :-1]
            parts += [torch.zeros(1), logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]]
        out.append(torch.cat(parts))
    return out


@pytest.mark.gloo
def test_an_adapter_goes_out_and_comes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_hf_model(tmp_path / "model")
    model = ModelConfig(path=str(source))
    ours = next(filter(None, run_ranks(save_run, 2, model, tmp_path)))
    saved, adapter = str(tmp_path / "checkpoint"), tmp_path / "adapter"
    base = ["--source-hf", str(source)]
    assert main(["to-hf", saved, str(adapter), "--lora", *base]) == 0
    assert "peft 0.21 drops those of 3 matrices outside of experts" in capsys.readouterr().out
    for got, want in zip(score_by_hooks(source, adapter), ours, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    for origin, out in ((saved, "merged"), (str(adapter), "merged_peft")):
        assert main(["merge-lora", origin, str(tmp_path / out), *base]) == 0
        export = read(tmp_path / "export")
        merged = read(tmp_path / out)
        assert merged.keys() == export.keys()
        for name, value in export.items():
            torch.testing.assert_close(merged[name], value, rtol=0, atol=1e-6)
        assert not torch.equal(
            merged["model.layers.0.self_attn.q_proj.weight"],
            read(source)["model.layers.0.self_attn.q_proj.weight"],
        )
    for got, want in zip(run_ranks(start_again, 1, model, str(adapter))[0], ours, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    refuse_wrong_files(tmp_path, saved, adapter, capsys)


def refuse_wrong_files(
    root: Path, saved: str, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check what the commands say of another base, of weights, and of a missing option."""
    source = str(root / "model")
    other = str(write_hf_model(root / "other", initializer_range=0.07))
    cases = [
        (["merge-lora", saved, "--source-hf", other], "has factors of another base"),
        (["merge-lora", str(adapter), "--source-hf", other], "has factors of another base"),
        (["to-hf", saved, "--lora", "--source-hf", other], "has factors of another base"),
        (["to-hf", saved, "--source-hf", source], "holds low-rank factors and no weights"),
        (["merge-lora", source, "--source-hf", source], "holds no adapter: name a checkpoint"),
        (
            ["to-hf", saved, "--lora", "--dtype", "bfloat16", "--source-hf", source],
            "--dtype with --lora: factors are written as they are",
        ),
    ]
    for (command, first, *rest), message in cases:
        assert main([command, first, str(root / "never"), *rest]) == 2, message
        assert message in capsys.readouterr().err
        assert not (root / "never").exists()

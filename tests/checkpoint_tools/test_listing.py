"""The contents of a checkpoint, as one JSON object and as a table."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_tools.listing import encode_listing, list_facts, print_listing
from checkpoint_tools.opening import open_checkpoint
from tests.support.small_hf import read_all, write_hf, write_small_model


def test_json_has_every_tensor_with_its_file(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_small_model(tmp_path / "hf"))
    listing = json.loads(json.dumps(encode_listing(checkpoint)))
    assert (listing["kind"], listing["checksums"], listing["objects"]) == ("hf", False, [])
    assert listing["num_tensors"] == len(checkpoint.tensors) == len(listing["tensors"])
    assert listing["tensors"]["model.embed_tokens.weight"] == {
        "dtype": "bfloat16",
        "shape": [13, 8],
        "bytes": 13 * 8 * 2,
        "chunks": 1,
        "files": ["model.safetensors"],
    }
    assert "Qwen3MoeForCausalLM" in list_facts(checkpoint).values()


def test_the_table_has_a_row_per_tensor_and_then_totals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {"matrix": torch.ones(2, 3), "number": torch.tensor(1.0)}
    print_listing(open_checkpoint(write_hf(tmp_path / "hf", weights)))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[:3] == [
        ["tensor", "dtype", "shape", "chunks", "bytes"],
        ["matrix", "float32", "2x3", "1", "24", "B"],
        ["number", "float32", "scalar", "1", "4", "B"],
    ]
    assert ["bytes:", "28", "(28", "B)", "in", "1", "files"] in rows
    assert ["tensors:", "2", "(2", "of", "float32),", "0", "other", "objects"] in rows
    assert ["checksums:", "none"] in rows


@pytest.mark.gloo
def test_inspect_tells_step_layout_and_shapes(saved: Path, command: Any, capsys: Any) -> None:
    assert command("inspect", saved / "qwen3_moe/step", "--json") == 0
    listing = json.loads(capsys.readouterr().out)
    assert (listing["kind"], listing["step"], listing["layout"]["tp"]) == ("torch_dist", 1, 2)
    fc1 = listing["tensors"]["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert (fc1["shape"], fc1["dtype"]) == ([4, 8, 64, 64], "float32")
    assert listing["checksums"] and "rng/shard_0_2" in listing["objects"]
    assert command("inspect", saved / "exported") == 0
    text = capsys.readouterr().out
    assert "model.layers.3.mlp.experts.7.down_proj.weight" in text
    assert f"bytes: {sum(t.nbytes for t in read_all(saved / 'exported').values())} " in text

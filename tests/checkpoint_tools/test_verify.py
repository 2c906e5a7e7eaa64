"""Checkpoints of either kind are compared tensor by tensor, and with their own checksums."""

import json
from pathlib import Path
from zlib import crc32

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint_tools.files import write_checksums
from checkpoint_tools.from_hf import from_hf
from checkpoint_tools.opening import open_checkpoint
from checkpoint_tools.verify import Verdict, verify
from tests.support.small_hf import LARGE, ONE_WORKER, write_hf, write_small_model
from tests.support.tiny_models import write_model


def compare(first: Path, second: Path | None = None) -> Verdict:
    return verify(first, second, None, False, ONE_WORKER)


def test_a_checkpoint_alone_is_read_and_summed(tmp_path: Path) -> None:
    tensor = torch.arange(6, dtype=torch.float32)
    folder = write_hf(tmp_path / "hf", {"a": tensor})
    verdict = compare(folder)
    assert verdict.equal and verdict.checked == 0
    assert (verdict.num_tensors, verdict.num_bytes) == (1, 24)
    assert verdict.crc32 == {"a": crc32(tensor.numpy().tobytes())}
    assert "came without checksums" in verdict.notes[0]
    write_checksums(open_checkpoint(folder))
    summed = compare(folder)
    assert summed.checked > 0 and not summed.notes


def test_a_changed_byte_is_refused_by_the_tensors_name(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "hf", {"a": torch.zeros(6)})
    write_checksums(open_checkpoint(folder))
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors.*'a'"):
        compare(folder)


def test_every_kind_of_difference_has_a_line(tmp_path: Path) -> None:
    shared = {"same": torch.ones(2)}
    first: dict[str, Tensor] = {
        "cast": torch.ones(2),
        "less": torch.ones(2),
        "value": torch.ones(3),
    }
    second: dict[str, Tensor] = {
        "cast": torch.ones(2).half(),
        "more": torch.ones(2),
        "value": torch.tensor([1.0, 3.0, 1.0]),
    }
    verdict = compare(
        write_hf(tmp_path / "1", shared | first), write_hf(tmp_path / "2", shared | second)
    )
    assert not verdict.equal
    cast, less, more, value = verdict.differences
    assert cast == "cast: float32 [2] and float16 [2]"
    assert less == "less: only in the first"
    assert more == "more: only in the second"
    assert value.startswith(
        "value: 1 of 3 elements differ, the first at [1]: 1.0 and 3.0; largest difference 2;"
    )
    assert verdict.num_tensors == 2


def test_kinds_are_compared_by_huggingface_names(tmp_path: Path) -> None:
    source = write_small_model(tmp_path / "hf")
    from_hf(source, tmp_path / "step", None, None, LARGE, ONE_WORKER)
    verdict = compare(tmp_path / "step", source)
    assert verdict.equal
    assert verdict.crc32.keys() == open_checkpoint(source).tensors.keys()
    assert verdict.crc32 == compare(source).crc32


def write_headed(folder: Path, tied: bool, head: float | None) -> Path:
    """Write a model whose output layer is its embeddings plus `head`, if it is stored at all."""
    write_model("qwen3", folder, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    if head is not None:
        tensors["lm_head.weight"] = (tensors["model.embed_tokens.weight"] + head).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("first", "second", "differs"),
    [
        ((True, None), (True, None), False),
        ((True, None), (True, 0.0), False),
        ((True, None), (False, 0.0), False),
        ((True, 0.0), (False, 0.0), False),
        ((True, None), (False, 1.0), True),
        ((False, 0.0), (False, 1.0), True),
    ],
)
def test_a_tied_output_layer_is_that_of_the_embeddings(
    tmp_path: Path,
    first: tuple[bool, float | None],
    second: tuple[bool, float | None],
    differs: bool,
) -> None:
    folders = [write_headed(tmp_path / "first", *first), write_headed(tmp_path / "second", *second)]
    for one, other in (folders, folders[::-1]):
        lines = compare(one, other).differences
        assert [line.partition(":")[0] for line in lines] == ["lm_head.weight"] * differs

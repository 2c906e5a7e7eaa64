"""The reader of .metadata: what torch wrote is read, and a name off the allow-list is refused."""

import os
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItemType

from mcore_rl.weights.megatron_files.metadata import Place, read_metadata, read_places, read_shape

SHAPE = torch.Size([4, 6])
OFFSET = torch.Size([0, 0])
INFO = _StorageInfo("__0_0.distcp", 10, 96)


def pickled(storage: dict[MetadataIndex, Any], protocol: int = 2, **fields: Any) -> bytes:
    chunks = [ChunkStorageMetadata(OFFSET, SHAPE)]
    weight = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), SHAPE, chunks)
    return pickle.dumps(Metadata({"w": weight}, storage_data=storage, **fields), protocol)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_tensors_and_places_are_read_in_every_protocol(protocol: int) -> None:
    storage = {
        MetadataIndex("w", OFFSET): INFO,
        MetadataIndex("rng/shard_0_1"): _StorageInfo("__1_0.distcp", 0, 5),
    }
    metadata = read_metadata(pickled(storage, protocol), "file")
    entry = metadata.get("state_dict_metadata")["w"]
    assert read_shape(entry.get("size")) == (4, 6)
    assert entry.get("properties").args[0] == "bfloat16"
    assert read_places(metadata) == {
        ("w", (0, 0)): Place("w", "__0_0.distcp", 10, 96),
        ("rng/shard_0_1", None): Place("rng/shard_0_1", "__1_0.distcp", 0, 5),
    }


def test_members_of_enums_are_read_as_the_first_releases_of_3_11_pickle_them() -> None:
    member = Named(getattr, WriteItemType, "TENSOR")
    metadata = read_metadata(pickled({}, 4, planner_data=member), "file")
    assert metadata.get("planner_data").args == ("TENSOR",)


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (WriteItemType, "__class__"),
        (WriteItemType, 3),
        (Metadata, "TENSOR"),
        (torch.Size, "COUNT"),
        ("text", "UPPER"),
    ],
)
def test_attributes_of_anything_else_are_not(holder: Any, name: Any) -> None:
    content = pickled({}, 4, planner_data=Named(getattr, holder, name))
    with pytest.raises(ValueError, match=r"names builtins\.getattr of what is no enum: not loaded"):
        read_metadata(content, "file")


class Named:
    """Pickles as a call of any callable."""

    def __init__(self, function: Any, *args: Any) -> None:
        self._call = (function, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.getcwd, r"(posix|os)\.getcwd"),
        (eval, r"builtins\.eval"),
        (getattr, r"builtins\.getattr"),
        (torch.load, r"torch\.serialization\.load"),
    ],
)
def test_other_names_are_refused(function: Any, name: str) -> None:
    content = pickled({}, protocol=4, planner_data=Named(function, "x", "y"))
    with pytest.raises(ValueError, match=rf"^file is damaged .* names {name}"):
        read_metadata(content, "file")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.metadata", "pickle"),
        ("torch", "float32.__class__"),
        ("torch.distributed.checkpoint.filesystem.os", "system"),
    ],
)
def test_names_inside_allowed_modules_are_refused(module: str, name: str) -> None:
    content = b"\x80\x04" + b"".join(
        b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)
    )
    with pytest.raises(ValueError, match=rf"names {module}\.{name}, which no checkpoint needs"):
        read_metadata(content + b"\x93.", "file")


@pytest.mark.parametrize("content", [b"", b"junk", pickle.dumps([1]), pickled({})[:-20]])
def test_damaged_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"^file is damaged or was not written by torch"):
        read_metadata(content, "file")


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ({MetadataIndex("w"): _StorageInfo("../f", 0, 5)}, "'../f', which is not a file"),
        ({MetadataIndex("w"): _StorageInfo("/etc/f", 0, 5)}, "'/etc/f', which is not a file"),
        ({MetadataIndex("w"): _StorageInfo("f", -1, 5)}, "offset -1 and length 5"),
        ({MetadataIndex("w"): _StorageInfo("f", 0, 0)}, "offset 0 and length 0"),
        ({MetadataIndex("w"): _StorageInfo("f", 0, 5, ("zstd",))}, "stored transformed"),
    ],
)
def test_wrong_places_are_refused(storage: dict[MetadataIndex, Any], message: str) -> None:
    metadata = read_metadata(pickled(storage), "file")
    with pytest.raises(ValueError, match=message):
        read_places(metadata)

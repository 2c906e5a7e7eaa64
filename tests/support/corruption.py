"""Damage to a checkpoint, chosen by a seed, and words; the error must contain one of them."""

import json
import pickle
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.weights.hf.checksums import MANIFEST

Header = list[tuple[str, dict[str, Any]]]
UNCHECKED = (
    MANIFEST,
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)
"""Files of which structure says nothing."""


@dataclass(frozen=True)
class Damage:
    """`words`: file or tensor; the error has to name one of them."""

    what: str
    words: tuple[str, ...]


def data_files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.safetensors"), *folder.glob("*.distcp")])


def truncate(folder: Path, rng: random.Random) -> Damage:
    path = rng.choice([path for path in sorted(folder.iterdir()) if path.name not in UNCHECKED])
    keep = rng.randrange(path.stat().st_size)
    path.write_bytes(path.read_bytes()[:keep])
    return Damage(f"{path.name} cut to {keep} bytes", (path.name,))


def flip(folder: Path, rng: random.Random) -> Damage:
    """Any bit of any file; only checksums.json can show all of them."""
    path = rng.choice(sorted(folder.iterdir()))
    return _flip_at(path, rng.randrange(path.stat().st_size), rng)


def flip_element(folder: Path, rng: random.Random) -> Damage:
    """A bit of a large tensor of the model in an archive, which has a checksum of its own."""
    entries = read_metadata(folder).storage_data.items()
    found = [(index, info) for index, info in entries if info.length > 4096]
    index, info = rng.choice(
        [(i, s) for i, s in found if not i.fqn.startswith(("rng", "optimizer"))]
    )
    damage = _flip_at(folder / info.relative_path, info.offset + 1024 + rng.randrange(2048), rng)
    return Damage(damage.what, (index.fqn,))


def _flip_at(path: Path, at: int, rng: random.Random) -> Damage:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return Damage(f"{path.name}: a bit of byte {at} flipped", (path.name, MANIFEST))


def lose(folder: Path, rng: random.Random) -> Damage:
    path = rng.choice(data_files(folder))
    path.unlink()
    return Damage(f"{path.name} removed", (path.name,))


def swap_two_files(folder: Path, rng: random.Random) -> Damage:
    first, second = rng.sample(data_files(folder), 2)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    return Damage(
        f"{first.name} and {second.name} swapped", (first.name, second.name, "index.json")
    )


def _edit_header(
    folder: Path, rng: random.Random, edit: Callable[[Header], tuple[str, str]]
) -> Damage:
    path = rng.choice(data_files(folder))
    content = path.read_bytes()
    (header_bytes,) = struct.unpack("<Q", content[:8])
    header = list(json.loads(content[8 : 8 + header_bytes]).items())
    what, name = edit(header)
    text = "{" + ",".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in header) + "}"
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + content[8 + header_bytes :])
    return Damage(f"{path.name}: {what} of {name}", (name,))


def _pick(header: Header, rng: random.Random, wanted: Callable[[str, dict[str, Any]], bool]) -> int:
    places = [
        i
        for i, (name, entry) in enumerate(header)
        if name != "__metadata__" and wanted(name, entry)
    ]
    return rng.choice(places)


def hf_shape(folder: Path, rng: random.Random) -> Damage:
    def edit(header: Header) -> tuple[str, str]:
        at = _pick(
            header, rng, lambda _, e: len(e["shape"]) == 2 and e["shape"][0] != e["shape"][1]
        )
        name, entry = header[at]
        shape = rng.choice([entry["shape"][::-1], [entry["shape"][0] + 1, entry["shape"][1]]])
        header[at] = name, {**entry, "shape": shape}
        return f"shape {shape}", name

    return _edit_header(folder, rng, edit)


def hf_dtype(folder: Path, rng: random.Random) -> Damage:
    def edit(header: Header) -> tuple[str, str]:
        at = _pick(header, rng, lambda *_: True)
        name, entry = header[at]
        others = ("BF16", "I32", "F64", "F8_E4M3", "COMPLEX")
        dtype = rng.choice([dtype for dtype in others if dtype != entry["dtype"]])
        header[at] = name, {**entry, "dtype": dtype}
        return f"dtype {dtype}", name

    return _edit_header(folder, rng, edit)


def hf_duplicate(folder: Path, rng: random.Random) -> Damage:
    def edit(header: Header) -> tuple[str, str]:
        first, second = (_pick(header, rng, lambda *_: True) for _ in range(2))
        header[second] = header[first] if first != second else header[second]
        header.append(header[first])
        return "second entry", header[first][0]

    return _edit_header(folder, rng, edit)


def hf_rename_expert(folder: Path, rng: random.Random) -> Damage:
    number = rng.choice(["7", "8", "99", "x"])

    def edit(header: Header) -> tuple[str, str]:
        at = _pick(header, rng, lambda name, _: ".experts.3." in name)
        name, entry = header[at]
        header[at] = name.replace(".experts.3.", f".experts.{number}."), entry
        return f"renamed to expert {number}", name

    damage = _edit_header(folder, rng, edit)
    return Damage(
        damage.what, (*damage.words, damage.words[0].replace(".experts.3.", f".experts.{number}."))
    )


def hf_index(folder: Path, rng: random.Random) -> Damage:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = rng.choice(sorted(index["weight_map"]))
    files = sorted(set(index["weight_map"].values()))
    change = rng.choice(["missing", "elsewhere", "total_size", "no such file"])
    if change == "missing":
        del index["weight_map"][name]
    elif change == "total_size":
        index["metadata"]["total_size"] += 4
    else:
        other = next(file for file in files if file != index["weight_map"][name])
        index["weight_map"][name] = other if change == "elsewhere" else "model-x.safetensors"
    path.write_text(json.dumps(index))
    return Damage(f"index: {name} {change}", (path.name, name, "model-x.safetensors"))


def read_metadata(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def _edit_metadata(
    folder: Path, rng: random.Random, edit: Callable[[Any, str], str], name: str = "weight"
) -> Damage:
    metadata = read_metadata(folder)
    entries = metadata.state_dict_metadata
    key = rng.choice([key for key in entries if name in key and not key.startswith("optimizer")])
    what = edit(metadata, key)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return Damage(f"{key}: {what}", (key,))


def dist_shape(folder: Path, rng: random.Random) -> Damage:
    import torch

    def edit(metadata: Any, key: str) -> str:
        entry = metadata.state_dict_metadata[key]
        change = rng.choice(["tensor", "chunk", "offset"])
        chunk = entry.chunks[rng.randrange(len(entry.chunks))]
        if change == "tensor":
            entry.size = torch.Size((entry.size[0] * 2, *entry.size[1:]))
        elif change == "chunk":
            chunk.sizes = torch.Size((*chunk.sizes[:-1], chunk.sizes[-1] - 1))
        else:
            chunk.offsets = torch.Size((chunk.offsets[0] + 1, *chunk.offsets[1:]))
        return f"{change} of another shape"

    return _edit_metadata(folder, rng, edit)


def dist_dtype(folder: Path, rng: random.Random) -> Damage:
    import torch

    dtype = rng.choice([torch.bfloat16, torch.int32, torch.float64, torch.complex64])

    def edit(metadata: Any, key: str) -> str:
        metadata.state_dict_metadata[key].properties.dtype = dtype
        return f"as {dtype}"

    return _edit_metadata(folder, rng, edit)


def dist_duplicate(folder: Path, rng: random.Random) -> Damage:
    def edit(metadata: Any, key: str) -> str:
        entry = metadata.state_dict_metadata[key]
        if rng.random() < 0.5 or len(entry.chunks) == 1:
            entry.chunks.append(rng.choice(entry.chunks))
            return "a chunk twice"
        entry.chunks[0] = entry.chunks[1]
        return "a chunk in place of another"

    return _edit_metadata(folder, rng, edit)


def dist_alias(folder: Path, rng: random.Random) -> Damage:
    """Two chunks of one tensor in the same place."""

    def edit(metadata: Any, key: str) -> str:
        indices = [index for index in metadata.storage_data if index.fqn == key]
        first, second = rng.sample(indices, 2)
        metadata.storage_data[first] = metadata.storage_data[second]
        return f"chunks {first.offset} and {second.offset} in one place"

    return _edit_metadata(folder, rng, edit, name=".experts.experts.")


def dist_rename(folder: Path, rng: random.Random) -> Damage:
    other = rng.choice(["fc3", "fc1.extra"])

    def edit(metadata: Any, key: str) -> str:
        entries = metadata.state_dict_metadata
        entries[key.replace("fc1", other)] = entries.pop(key)
        return f"renamed to {other}"

    damage = _edit_metadata(folder, rng, edit, name="experts.linear_fc1")
    return Damage(damage.what, (*damage.words, damage.words[0].replace("fc1", other)))


def dist_foreign_code(folder: Path, rng: random.Random) -> Damage:
    marker = folder.parent / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (marker,)

    metadata = read_metadata(folder)
    metadata.planner_data = Evil()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return Damage("code in .metadata", (".metadata",))


SHOWN_BY_STRUCTURE: dict[str, tuple[Callable[[Path, random.Random], Damage], ...]] = {
    "hf": (
        truncate,
        lose,
        swap_two_files,
        hf_shape,
        hf_dtype,
        hf_duplicate,
        hf_rename_expert,
        hf_index,
    ),
    "torch_dist": (
        truncate,
        lose,
        swap_two_files,
        flip_element,
        dist_shape,
        dist_dtype,
        dist_duplicate,
        dist_alias,
        dist_rename,
        dist_foreign_code,
    ),
}
"""Damage that is found also in a checkpoint without checksums."""

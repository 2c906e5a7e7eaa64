"""Damage to the object of a checkpoint that holds what is not sharded (steps, learning rates)."""

import io
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_rl.weights.megatron_files.metadata import COMMON, COMMON_OBJECT
from tests.support.corruption import Damage, read_metadata

RAN = "ran"
"""Folder beside the checkpoint that code in one of its pickles would make."""


class Hostile:
    """An object whose pickle makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def archive(value: object) -> bytes:
    """Return what torch.save writes."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def read_object(folder: Path, key: str = COMMON_OBJECT) -> bytes:
    _, info = _find(read_metadata(folder), key)
    content = (folder / info.relative_path).read_bytes()
    return content[info.offset : info.offset + info.length]


def write_object(folder: Path, content: bytes, key: str = COMMON_OBJECT) -> str:
    """Put `content` in the place of an object, and move what follows; return the file's name."""
    metadata = read_metadata(folder)
    _, old = _find(metadata, key)
    path = folder / old.relative_path
    whole = path.read_bytes()
    path.write_bytes(whole[: old.offset] + content + whole[old.offset + old.length :])
    for index, info in metadata.storage_data.items():
        if info.relative_path != old.relative_path:
            continue
        if info.offset == old.offset:
            metadata.storage_data[index] = replace(info, length=len(content))
        elif info.offset > old.offset:
            offset = info.offset + len(content) - old.length
            metadata.storage_data[index] = replace(info, offset=offset)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return old.relative_path


def _find(metadata: Any, key: str) -> tuple[Any, Any]:
    [found] = [(index, info) for index, info in metadata.storage_data.items() if index.fqn == key]
    return found


def flip(folder: Path, rng: random.Random) -> Damage:
    """A bit of the pickle, for which the archive has a checksum."""
    content = bytearray(read_object(folder))
    with zipfile.ZipFile(io.BytesIO(content)) as opened:
        [member] = [m for m in opened.infolist() if m.filename.endswith("data.pkl")]
    name_len, extra_len = struct.unpack_from("<HH", content, member.header_offset + 26)
    first = member.header_offset + 30 + name_len + extra_len
    content[first + rng.randrange(member.file_size)] ^= 1 << rng.randrange(8)
    return Damage("a bit flipped", (write_object(folder, bytes(content)),))


def blank(folder: Path, rng: random.Random) -> Damage:
    """All bytes 0, or random ones."""
    size = len(read_object(folder))
    content = rng.choice([bytes(size), rng.randbytes(size)])
    return Damage("other bytes", (write_object(folder, content),))


def cut_object(folder: Path, rng: random.Random) -> Damage:
    content = read_object(folder)
    content = content[: rng.randrange(1, len(content))]
    return Damage(f"cut to {len(content)} bytes", (write_object(folder, content),))


def cut_file(folder: Path, rng: random.Random) -> Damage:
    """The file that the object lies in ends within the object, or before it."""
    _, info = _find(read_metadata(folder), COMMON_OBJECT)
    os.truncate(folder / info.relative_path, rng.randrange(info.offset + info.length))
    return Damage("file cut", (info.relative_path,))


def lose_entry(folder: Path, rng: random.Random) -> Damage:
    """.metadata does not say where the object lies, or not that there is one."""
    metadata = read_metadata(folder)
    index, info = _find(metadata, COMMON_OBJECT)
    which = rng.choice(["place", "both"])
    del metadata.storage_data[index]
    if which == "both":
        del metadata.state_dict_metadata[COMMON_OBJECT]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return Damage(f"{which} missing", (COMMON_OBJECT, info.relative_path))


def move_entry(folder: Path, rng: random.Random) -> Damage:
    """.metadata points to another object, or to a place beside this one."""
    metadata = read_metadata(folder)
    index, info = _find(metadata, COMMON_OBJECT)
    others = [i for key, i in metadata.storage_data.items() if key.fqn.startswith("rng/")]
    changed = [
        *others,
        replace(info, offset=info.offset + 1 + rng.randrange(64)),
        replace(info, length=info.length - 1 - rng.randrange(64)),
        replace(info, relative_path="__7_7.distcp"),
        replace(info, relative_path="../" + info.relative_path),
    ]
    metadata.storage_data[index] = rng.choice(changed)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    words = (COMMON_OBJECT, *(place.relative_path for place in (info, *changed)))
    return Damage("moved", words)


def add_old_form(folder: Path, rng: random.Random) -> Damage:
    """common.pt beside the object, as an older megatron-core wrote it."""
    import torch

    torch.save({"step": rng.randrange(9), "extra": {}, "layout": {}}, folder / COMMON)
    return Damage("both forms", (COMMON,))


def put_code(folder: Path, rng: random.Random) -> Damage:
    """Pickles that would run code, as archives of torch.save and bare."""
    hostile = Hostile(folder.parent / RAN)
    values = [[hostile], [{"step": hostile}], hostile, {"layout": [hostile]}]
    contents = [archive(value) for value in values]
    contents += [pickle.dumps(hostile, protocol) for protocol in range(6)]
    return Damage("code", (write_object(folder, rng.choice(contents)),))


def put_code_in_old_form(folder: Path, rng: random.Random) -> Damage:
    """The same in a common.pt that replaces the object."""
    lose_entry(folder, random.Random(1))
    hostile = Hostile(folder.parent / RAN)
    values = [archive({"step": hostile}), pickle.dumps(hostile, rng.randrange(6))]
    (folder / COMMON).write_bytes(rng.choice(values))
    return Damage("code in common.pt", (COMMON,))


def put_other_value(folder: Path, rng: random.Random) -> Damage:
    """Put a value there that is no state of a run, or lacks a part of one."""
    import torch

    state = {"step": 3, "extra": {}, "layout": {"tp": 1}}
    lost = rng.choice(list(state))
    values: list[Any] = [
        *(torch.ones(3), [], [torch.ones(3)], [1], state, [state, state], [[state]], None),
        [{name: value for name, value in state.items() if name != lost}],
        [{**state, lost: "text"}],
    ]
    return Damage("another value", (write_object(folder, archive(rng.choice(values))),))


SHOWN_BY_STRUCTURE: tuple[Callable[[Path, random.Random], Damage], ...] = (
    flip,
    blank,
    cut_object,
    cut_file,
    lose_entry,
    move_entry,
    add_old_form,
)
"""Damage that whoever opens a checkpoint finds, also without checksums."""
SHOWN_BY_CONTENT = (put_code, put_code_in_old_form, put_other_value)
"""Damage that only a reader of the object finds."""

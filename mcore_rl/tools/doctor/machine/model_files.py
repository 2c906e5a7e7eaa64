"""Checks that a model directory is complete: configuration, tokenizer, every shard in its size.

Checks Hugging Face's cache, from which models and data sets are read, and its offline mode.
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from mcore_rl.tools.doctor.machine.finding import Finding, failed, ok
from mcore_rl.tools.doctor.machine.needs import MachineNeeds, NamedModel
from mcore_rl.weights.hf.folder import INDEX

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
TRUE = ("1", "ON", "YES", "TRUE")


def hub_home() -> Path:
    """Return the folder of Hugging Face's caches: $HF_HOME, or huggingface in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or str(Path(cache, "huggingface"))
    return Path(os.path.expandvars(home)).expanduser()


def is_offline() -> bool:
    """Return whether an environment variable keeps huggingface_hub off the network."""
    return any(os.environ.get(name, "").upper() in TRUE for name in OFFLINE)


def check_hub_cache(needs: MachineNeeds) -> list[Finding]:
    """Whether the cache can be read and, unless it is used offline, written."""
    home = hub_home()
    offline = is_offline()
    mode = "offline: only what lies there is used" if offline else "online"
    remedy = "set HF_HOME to a folder that this user can write, the same on every node"
    if not home.is_dir():
        if offline:
            text = f"{home} does not exist, and {' or '.join(OFFLINE)} keeps off the network"
            return [failed("hub cache", text, "set HF_HOME to a cache that has the models")]
        above = next(folder for folder in home.absolute().parents if folder.exists())
        if not os.access(above, os.W_OK):
            return [failed("hub cache", f"{home} cannot be made below {above}", remedy)]
        return [ok("hub cache", f"{home} will be made; {mode}")]
    if not os.access(home, os.R_OK | os.X_OK) or not (offline or os.access(home, os.W_OK)):
        return [failed("hub cache", f"{home} cannot be {'read' if offline else 'written'}", remedy)]
    return [ok("hub cache", f"{home}; {mode}")]


TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "*.tiktoken", "tekken.json")
LARGEST_HEADER = 100 << 20
"""safetensors itself refuses longer ones."""
POINTER = b"version https://git-lfs"
CHECK = "model"


def check_models(needs: MachineNeeds) -> list[Finding]:
    """Whether the models of the recipe, or of --model, are here and whole."""
    return [finding for model in needs.models for finding in _check_model(model)]


def _check_model(model: NamedModel) -> list[Finding]:
    folder = Path(model.path)
    if folder.is_dir():
        return check_folder(folder, model.option, model.with_weights)
    if model.option == "--model" or model.path.count("/") != 1 or model.path.startswith((".", "/")):
        text = f"{model.option}={model.path}: there is no such folder"
        return [failed(CHECK, text, "check the path; on a cluster it must lie on a shared disk")]
    return _check_in_cache(model)


def _check_in_cache(model: NamedModel) -> list[Finding]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repo, _, revision = model.path.partition("@")
    wanted = model.revision or revision or None
    try:
        folder = Path(snapshot_download(repo, revision=wanted, local_files_only=True))
    except LocalEntryNotFoundError:
        text = f"{model.option}={model.path} is not in Hugging Face's cache"
        if is_offline():
            remedy = f"where there is a network: hf download {repo}, then copy HF_HOME here"
            return [failed(CHECK, f"{text}, and the network is switched off", remedy)]
        return [ok(CHECK, f"{text}; a run downloads it")]
    return check_folder(folder, model.option, model.with_weights)


def check_folder(folder: Path, option: str, with_weights: bool) -> list[Finding]:
    """Return a failure for each missing or damaged file of a model, or one line with its size."""
    wrong = list(_wrong_small_files(folder))
    num_bytes = 0
    shards: dict[str, set[str]] = {}
    if with_weights:
        try:
            shards = _shards(folder)
        except ValueError as error:
            wrong.append(str(error))
        for name, tensors in shards.items():
            try:
                num_bytes += check_shard(folder / name, tensors)
            except ValueError as error:
                wrong.append(str(error))
    if wrong:
        remedy = "hf download <owner>/<name> fetches what is missing; or name another directory"
        return [failed(CHECK, f"{option}={folder}: {text}", remedy) for text in wrong]
    text = f"{option}={folder}: whole"
    text += (
        f", {len(shards)} files, {num_bytes / 2**30:.1f} GiB" if with_weights else ", no weights"
    )
    return [ok(CHECK, text, bytes=num_bytes)]


def _wrong_small_files(folder: Path) -> Iterator[str]:
    if not (folder / "config.json").is_file():
        yield "config.json is missing"
    else:
        try:
            json.loads((folder / "config.json").read_text())
        except ValueError as error:
            yield f"config.json is no JSON ({error})"
    if not any(path.is_file() for pattern in TOKENIZERS for path in folder.glob(pattern)):
        yield f"there is no tokenizer ({', '.join(TOKENIZERS)})"


def _shards(folder: Path) -> dict[str, set[str]]:
    """File -> the tensors that the index puts there; none are named if there is no index."""
    index = folder / INDEX
    if not index.is_file():
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if not names:
            raise ValueError("there are no *.safetensors")
        return {name: set() for name in names}
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files: dict[str, set[str]] = {name: set() for name in sorted(set(weight_map.values()))}
        for tensor, name in weight_map.items():
            files[name].add(tensor)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{INDEX} cannot be read ({error!r})") from None
    return files


def check_shard(path: Path, tensors: set[str]) -> int:
    """Return the bytes of a safetensors file, which has these tensors and the size it states.

    Raises ValueError naming the file and what is wrong with it. Only its header is read.
    """
    if not path.is_file():
        raise ValueError(f"the shard {path.name} is missing")
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(POINTER))
        if start == POINTER:
            raise ValueError(f"{path.name} is a pointer of Git LFS: run git lfs pull there")
        header = _read_header(file.fileno(), num_bytes, path.name)
    stated = 8 + header[0] + _end_of_data(header[1], path.name)
    if stated != num_bytes:
        raise ValueError(f"{path.name} has {num_bytes} bytes, its header says {stated}")
    if absent := sorted(tensors - header[1].keys()):
        raise ValueError(f"{path.name} lacks {absent[0]}, which {INDEX} puts there")
    return num_bytes


def _read_header(file: int, num_bytes: int, name: str) -> tuple[int, Mapping[str, dict]]:
    if num_bytes < 8:
        raise ValueError(f"{name} has {num_bytes} bytes, too few for a header")
    (length,) = struct.unpack("<Q", os.pread(file, 8, 0))
    if length > min(LARGEST_HEADER, num_bytes - 8):
        raise ValueError(f"{name} has {num_bytes} bytes, its header alone would have {length}")
    try:
        return length, dict(json.loads(os.pread(file, length, 8)))
    except ValueError as error:
        raise ValueError(f"{name} has a header that is no JSON ({error})") from None


def _end_of_data(header: Mapping[str, dict], name: str) -> int:
    try:
        ends = [e["data_offsets"][1] for key, e in header.items() if key != "__metadata__"]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{name} has a tensor without data_offsets ({error!r})") from None
    return max(ends, default=0)

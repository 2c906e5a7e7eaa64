"""Says of a model which of its parts are known here, and what would have to be written.

config.json, and the names of tensors beside it -> nearest table -> parts, rows, settings
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from checkpoint_tools.hf import read_index
from checkpoint_tools.int4 import unpack_names
from checkpoint_tools.safetensors_file import read_header
from checkpoint_tools.stored import StoredTensor
from checkpoint_tools.support.parts import DENSE_MLP, has_dense_layers, is_silent, list_present
from checkpoint_tools.support.tables import RowMatch, compare_rows, find_nearest, read_with
from mcore_rl.weights.hf.config import parse_hf_config, with_text_settings
from mcore_rl.weights.hf.fp8 import find_scaled_name
from mcore_rl.weights.hf.int4 import find_quantization
from mcore_rl.weights.hf.packing import find_packing
from mcore_rl.weights.models import FAMILIES, REFUSED, refuse_unsupported
from mcore_rl.weights.models.settings import DEQUANTIZABLE, drop_quantization
from mcore_rl.weights.models.table import Shape

GUIDE = "docs/add_a_family.md"
SHOWN_SETTINGS = 12
CLASSES = {"transformers": "models/*/modeling_*.py", "sglang": "srt/models/*.py"}
"""Package -> the files that have its model classes."""


@dataclass(frozen=True)
class Support:
    """Findings about a model.

    refusal    why runs refuse the model; "" if they take it
    nearest    architecture of the table that it was compared with
    known      parts that this table reads
    missing    part -> what would have to be written for it
    lacking    keys that the table needs and config.json lacks
    settings   settings that no part stands for and the table does not read
    rows       how tensors compare with the table's rows; None without any tensors
    weights    how the weights are stored, and what has to be done about it
    classes    package -> its file with a class of that architecture; "" if it has none
    """

    architecture: str
    refusal: str
    nearest: str
    known: tuple[str, ...]
    missing: Mapping[str, str]
    lacking: tuple[str, ...]
    settings: Mapping[str, Any]
    rows: RowMatch | None
    weights: str
    classes: Mapping[str, str]

    @property
    def is_supported(self) -> bool:
        """Return whether a run could train the model, once its weights are plain or INT4."""
        rows = self.rows
        return not self.refusal and not (rows and (rows.missing or rows.unfilled or rows.reshaped))


def find_support(path: Path) -> Support:
    """Return what is known of a model, by its config.json or its directory.

    Names of tensors are read from the index or the files beside config.json, if there are any.
    Raises ValueError with the file for a config.json that cannot be read.
    """
    folder = path.parent if path.name == "config.json" else path
    whole = parse_hf_config(folder)
    config = drop_quantization(with_text_settings(whole))
    stored = list_stored(folder)
    family = find_nearest(config, stored)
    reading = read_with(family, config)
    missing: dict[str, str] = {}
    known: list[str] = []
    told: set[str] = set()
    for part in list_present(config):
        told.update(part.keys)
        if reading.keys & config.keys() & set(part.keys):
            known.append(part.name)
        elif part.name != DENSE_MLP or has_dense_layers(config):
            missing[part.name] = part.to_write
    settings = {
        key: value
        for key, value in config.items()
        if key not in reading.keys | told and not is_silent(key, value)
    }
    return Support(
        architecture=(config.get("architectures") or [""])[0],
        refusal=_find_refusal(config),
        nearest=family.architecture,
        known=tuple(known),
        missing=missing,
        lacking=tuple(sorted(reading.lacking)),
        settings=settings,
        rows=compare_rows(family, config, stored) if stored else None,
        weights=_describe_weights(whole),
        classes={package: _find_class(package, config) for package in CLASSES},
    )


def list_stored(folder: Path) -> dict[str, Shape | None]:
    """Return the shape of each matrix in a directory, by name; None where only names are known."""
    files = sorted(folder.glob("*.safetensors"))
    index = read_index(folder)
    if not files:
        return dict.fromkeys(index["weight_map"]) if index else {}
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors |= read_header(file)
    shapes: dict[str, Shape | None] = {}
    for name, tensor in unpack_names(tensors).items():
        if find_scaled_name(name) is None:
            is_mxfp4 = name.endswith(("_blocks", "_scales"))
            shapes[name] = None if is_mxfp4 else tensor.shape
    return shapes


def _find_refusal(config: Mapping[str, Any]) -> str:
    architecture = (config.get("architectures") or [""])[0]
    if architecture in REFUSED:
        return REFUSED[architecture]
    if architecture not in FAMILIES:
        return "no table has this architecture"
    try:
        refuse_unsupported(config)
    except (ValueError, LookupError, TypeError) as error:
        return str(error)
    return ""


def _describe_weights(config: Mapping[str, Any]) -> str:
    settings = find_quantization(config)
    if settings is None:
        return "plain"
    packing = find_packing(config)
    if packing != "plain":
        return f"{packing.upper()}, which is read as it is"
    method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
    if method in DEQUANTIZABLE:
        return f"{method}: write them in bfloat16 with mcore-rl-ckpt dequantize"
    return f"quant_method={method!r}, which nothing here reads: take plain weights"


def _find_class(package: str, config: Mapping[str, Any]) -> str:
    """Return the package's file with a class of the architecture; the package is not imported."""
    spec = find_spec(package)
    architecture = (config.get("architectures") or [""])[0]
    if spec is None or not spec.submodule_search_locations or not architecture.isidentifier():
        return ""
    root = Path(spec.submodule_search_locations[0])
    pattern = re.compile(rf"^class {architecture}\(", re.MULTILINE)
    for file in sorted(root.glob(CLASSES[package])):
        if pattern.search(file.read_text()):
            return str(file.relative_to(root))
    return ""


def encode_support(support: Support) -> dict[str, Any]:
    """Return all of it as JSON-like values."""
    rows = support.rows
    values = {field.name: getattr(support, field.name) for field in fields(support)}
    compared = rows and {
        "missing": {name: [shape, count] for name, (shape, count) in rows.missing.items()},
        "unfilled": rows.unfilled,
        "reshaped": rows.reshaped,
    }
    return {"supported": support.is_supported, **values, "rows": compared}


def describe_support(support: Support) -> Iterator[str]:
    """Yield lines for people."""
    yield f"{support.architecture or 'no architecture'}: {_describe_verdict(support)}"
    if support.nearest != support.architecture:
        yield f"nearest table: {support.nearest}"
    yield f"weights: {support.weights}"
    for package, file in support.classes.items():
        yield f"{package}: {file or 'no class of this name in the installed version'}"
    yield f"known parts: {', '.join(support.known) or 'none'}"
    for name, to_write in support.missing.items():
        if support.is_supported:
            yield f"part that is not trained: {name}"
        else:
            yield f"missing part: {name}: {to_write}"
    if support.lacking:
        yield f"keys that the table needs and config.json lacks: {', '.join(support.lacking)}"
    shown = list(support.settings.items())[:SHOWN_SETTINGS]
    for key, value in shown:
        yield f"setting that the table does not read: {key}={value!r:.60}"
    if len(support.settings) > len(shown):
        yield f"and {len(support.settings) - len(shown)} settings more"
    yield from _describe_rows(support.rows)
    if not support.is_supported:
        yield f"how to write what is missing: {GUIDE}"


def _describe_verdict(support: Support) -> str:
    if support.is_supported:
        return "supported"
    return support.refusal or "its tensors are not those of its table"


def _describe_rows(rows: RowMatch | None) -> Iterator[str]:
    if rows is None:
        yield "rows: not compared, for there are no weights and no index beside config.json"
        return
    for pattern, (shape, count) in rows.missing.items():
        sized = "" if shape is None else f" {list(shape)}"
        yield f"missing row: {pattern}{sized}, {count} tensors"
    for pattern in rows.unfilled:
        yield f"row without tensors: {pattern}"
    for pattern, (found, wanted) in rows.reshaped.items():
        yield f"row of another shape: {pattern} is {list(found)}, by the table {list(wanted)}"
    if not (rows.missing or rows.unfilled or rows.reshaped):
        yield "rows: every tensor has one"

"""Turns conversations into token ids, many at once, and keeps the ids on disk between runs.

The chat template is rendered conversation by conversation; the texts are then encoded in batches,
which tokenizers spreads over the machine's cores. The cache has one .npz file per key.
"""

import hashlib
import json
import logging
import os
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import transformers

_log = logging.getLogger(__name__)
Messages = Sequence[Mapping[str, Any]]
BATCH = 4096
"""Texts encoded at once; bounds the memory of their encodings."""
FORMAT = 1
"""Raise it when the meaning of cached entries changes."""


def default_cache_dir() -> Path:
    """Return mcore_rl/tokens in $XDG_CACHE_HOME, or in ~/.cache if that is not set."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mcore_rl" / "tokens"


def token_cache_dir(cache_dir: str) -> Path:
    """Return the folder that keeps token ids: data.cache_dir, or the default if it is empty."""
    return Path(cache_dir) if cache_dir else default_cache_dir()


class TokenCache:
    """A folder of entries. Several runs may share it: files appear whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(
        self, key: str, num_rows: int, make: Callable[[], Sequence[Sequence[int]]]
    ) -> Sequence[Sequence[int]]:
        """Return the entry of `num_rows` lists under `key`; make and keep it if there is none.

        An entry that cannot be read, or has another number of rows, counts as none and is replaced.
        A folder that cannot be written costs a warning.
        """
        path = self._folder / f"{key}.npz"
        rows = _read(path, num_rows)
        if rows is None:
            rows = make()
            try:
                _write(path, rows)
            except OSError as error:
                _log.warning("token ids are not kept in %s: %s", self._folder, error)
        return rows


def _read(path: Path, num_rows: int) -> list[list[int]] | None:
    """Return the rows; None if the file is missing or damaged, by its checksum (CRC-32) too."""
    try:
        with np.load(path, allow_pickle=False) as entry:
            ids = entry["ids"]
            lens = entry["lens"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        _log.warning("cached token ids in %s are damaged and made anew: %s", path, error)
        return None
    if len(lens) != num_rows or int(lens.sum()) != len(ids):
        _log.warning("cached token ids in %s do not fit their file and are made anew", path)
        return None
    flat = ids.tolist()
    stops = lens.cumsum().tolist()
    return [flat[stop - length : stop] for stop, length in zip(stops, lens.tolist(), strict=True)]


def _write(path: Path, rows: Sequence[Sequence[int]]) -> None:
    """Write under a temporary name first, so that a file of this name is always whole."""
    lens = np.array([len(row) for row in rows], dtype=np.int64)
    ids = np.fromiter((value for row in rows for value in row), dtype=np.int32, count=lens.sum())
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:  # umask decides who may read it
            np.savez(file, ids=ids, lens=lens)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class Tokenizer(Protocol):
    """The part of a HuggingFace tokenizer that data sets use."""

    @property
    def apply_chat_template(self) -> Callable[..., Any]: ...


class Tokenization:
    """Tokenizes conversations with the chat template, from the cache if it has them.

    Token ids equal those of `tokenizer.apply_chat_template(messages, tokenize=True)`, one by one.
    """

    def __init__(self, tokenizer: Tokenizer, cache_dir: str | Path | None = None) -> None:
        """`cache_dir`: folder of the cache; None keeps nothing."""
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint(tokenizer)
        self._cache = None
        if cache_dir is not None and self._fingerprint is not None:
            self._cache = TokenCache(Path(cache_dir))

    def encode(
        self,
        conversations: Sequence[Messages],
        *,
        add_generation_prompt: bool,
        files: Sequence[str],
        column: str,
    ) -> list[tuple[int, ...]]:
        """Return the token ids of each conversation.

        `conversations` must depend on nothing but the contents of `files` and `column`, a name for
        how they were read: these and the tokenizer are the key of the cache.
        """

        def encode() -> list[list[int]]:
            return list(self.encode_now(conversations, add_generation_prompt))

        if self._cache is None:
            return [tuple(ids) for ids in encode()]
        options = {"generation_prompt": add_generation_prompt, "column": column}
        key = self._key(files, options)
        return [tuple(ids) for ids in self._cache.get(key, len(conversations), encode)]

    def encode_now(
        self, conversations: Sequence[Messages], add_generation_prompt: bool
    ) -> Iterator[list[int]]:
        """Yield the token ids of each conversation, without the cache."""
        options = {"add_generation_prompt": add_generation_prompt}
        template: Any = self._tokenizer.apply_chat_template
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            for messages in conversations:
                yield template(messages, tokenize=True, return_dict=False, **options)
            return
        if not conversations:
            return
        # The public call sets the backend up: no truncation, no padding, special tokens as text.
        first = template(conversations[0], tokenize=True, return_dict=False, **options)
        for start in range(0, len(conversations), BATCH):
            batch = conversations[start : start + BATCH]
            texts = [template(messages, tokenize=False, **options) for messages in batch]
            encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
            if start == 0:
                assert encodings[0].ids == first, (encodings[0].ids, first)
            for encoding in encodings:
                yield encoding.ids

    def _key(self, files: Sequence[str], options: Mapping[str, Any]) -> str:
        contents = [hash_file(Path(name)) for name in files]
        parts = [FORMAT, self._fingerprint, contents, options]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def fingerprint(tokenizer: Any) -> str | None:
    """Return a hash of all that decides token ids; None if that is not known or changes by the day.

    Templates that ask for the date (strftime_now) give other ids tomorrow.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    template = getattr(tokenizer, "chat_template", None)
    if backend is None or template is None or "strftime_now" in str(template):
        return None
    state = json.loads(backend.to_str())
    for name in ("truncation", "padding"):  # calls change these two, chat templates ignore them
        state.pop(name, None)
    parts = [
        type(tokenizer).__name__,
        transformers.__version__,
        state,
        template,
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

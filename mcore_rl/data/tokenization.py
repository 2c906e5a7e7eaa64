"""Turns conversations into token ids, many at once, and keeps them on disk between runs.

The chat template is rendered conversation by conversation; the texts are then encoded in batches,
which tokenizers spreads over the machine's cores.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import transformers

from mcore_rl.data.token_cache import TokenCache

Messages = Sequence[Mapping[str, Any]]
BATCH = 4096
"""Texts encoded at once; bounds the memory of their encodings."""
FORMAT = 1
"""Raise it when the meaning of cached entries changes."""


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

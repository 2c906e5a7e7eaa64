"""Shrinks a recipe's sandbox and search for its rehearsal, with an index made on the spot."""

import json
from dataclasses import replace
from pathlib import Path

from mcore_rl.config import SandboxConfig, SearchConfig
from mcore_rl.process.disk import write_whole
from mcore_rl.services.search.build import build_index
from mcore_rl.services.search.layout import IndexOptions

_PASSAGES = tuple(f"passage {i}\nthe number {i} follows {i - 1} ." for i in range(1, 101))


def smallest_servers(
    sandbox: SandboxConfig, search: SearchConfig, folder: Path
) -> dict[str, SandboxConfig | SearchConfig]:
    """Return the groups `sandbox` and `search` of a rehearsal; an index is written to `folder`."""
    if sandbox.is_used:
        sessions = min(sandbox.max_sessions, 1)
        sandbox = replace(sandbox, workers=1, max_sessions=sessions)
    if search.is_used:
        search = replace(search, index=str(_write_index(folder)), method="bm25", threads=1)
    return {"sandbox": sandbox, "search": search}


def _write_index(folder: Path) -> Path:
    """Write a small corpus and its index; return the index."""
    corpus = folder / "passages.jsonl"
    rows = (json.dumps({"id": i, "contents": text}) for i, text in enumerate(_PASSAGES))
    text = "".join(f"{row}\n" for row in rows)
    if not corpus.exists() or corpus.read_text() != text:
        write_whole(corpus, text)
    build_index(corpus, folder / "index", IndexOptions(), None)
    return folder / "index"

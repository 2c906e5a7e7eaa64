"""Opens the data sets that a recipe names, by file, folder or glob, as one stream of prompts."""

import glob
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pyarrow as pa

from mcore_rl.config import DataConfig, SourceConfig
from mcore_rl.data.curriculum import Curriculum
from mcore_rl.data.streamed.index import RowIndex, count_rows, index_rows
from mcore_rl.data.streamed.mixed import MixedPrompts, MixedSource
from mcore_rl.data.streamed.prompts import RowRules, StreamedPrompts
from mcore_rl.data.streamed.windows import CHUNKS_PER_WINDOW, Windows
from mcore_rl.data.streamed.workers import MakeTokenizer, TokenWorkers
from mcore_rl.types.scores import Scores

SUFFIXES = (".parquet", ".jsonl")
_log = logging.getLogger(__name__)


def data_files(paths: Sequence[str]) -> list[str]:
    """Return the files in the order of `paths`; those of a folder or glob are sorted by name.

    A folder stands for the files in it and in the folders below, apart from hidden ones. Raises
    ValueError for a path without a file, and for files of another kind.
    """
    return [file for path in paths for file in _files_of(path)]


def _files_of(path: str) -> list[str]:
    if Path(path).is_dir():
        found = _select_data_files(path, Path(path).rglob("*"))
        if not found:
            raise ValueError(
                f"data folder {path} has no .parquet or .jsonl file: give another folder"
            )
        return found
    if not Path(path).exists() and glob.has_magic(path):
        matches = glob.glob(path, recursive=True)
        found = _select_data_files(path, map(Path, matches))
        if not found:
            raise ValueError(
                f"data files {path}: the pattern matches no .parquet or .jsonl file"
                f" ({len(matches)} others); give another one"
            )
        return found
    if not Path(path).is_file():
        raise ValueError(
            f"data file {path} does not exist; `mcore-rl data --help` lists what can be prepared"
        )
    if Path(path).suffix not in SUFFIXES:
        raise ValueError(f"data file {path}: expected .parquet or .jsonl")
    return [path]


def _select_data_files(top: str, paths: Iterable[Path]) -> list[str]:
    """Return data files by name, without hidden ones and those in hidden folders below `top`."""
    return sorted(
        str(path)
        for path in paths
        if path.suffix in SUFFIXES and path.is_file() and not _is_hidden(path, top)
    )


def _is_hidden(path: Path, top: str) -> bool:
    parts = path.relative_to(top).parts if Path(top).is_dir() else path.parts[-1:]
    return any(part.startswith(("_", ".")) for part in parts)


def is_streamed(config: DataConfig) -> bool:
    """Return whether the prompts are streamed: data sets that are mixed, large ones, and those with
    a curriculum.
    """
    if config.sources or config.curriculum.is_used:
        return True
    files = data_files(config.train)
    return count_rows(files, config.stream_above) > config.stream_above


def open_prompts(
    config: DataConfig,
    seed: int,
    make_tokenizer: MakeTokenizer,
    are_right: Callable[[Scores], Sequence[bool | None]],
) -> MixedPrompts:
    """Return the stream of the recipe's prompts.

    make_tokenizer   can be pickled; workers call it
    are_right        says which samples are right, for curricula by pass rate; None: nobody knows

    Raises ValueError naming the option or file if one cannot be used.
    """
    # Arrow's own allocator keeps tens of MiB that its threads have freed.
    pa.set_memory_pool(pa.system_memory_pool())
    rules = RowRules(config.max_prompt_len, config.overlong, config.curriculum.column)
    workers = TokenWorkers(make_tokenizer, config.workers)
    weighted = _list_weighted_paths(config)
    sources: list[MixedSource] = []
    num_rows = 0
    for number, (paths, weight) in enumerate(weighted):
        index = _open_index(config, paths, rules)
        # Sources of the same files would otherwise be drawn in the same order.
        source_seed = seed * 1009 + number
        windows = Windows(index, rules.columns, source_seed, config.shuffle)
        lookahead = -(-config.lookahead // len(weighted))
        prompts = StreamedPrompts(windows, workers, rules, lookahead, num_rows)
        sources.append(MixedSource(", ".join(paths), weight, prompts))
        num_rows += index.num_rows
    curriculum = Curriculum(config.curriculum, seed, num_rows)
    return MixedPrompts(sources, seed, curriculum, are_right, workers.close)


def _list_weighted_paths(config: DataConfig) -> list[tuple[list[str], float]]:
    """Return the paths and the weight of every data set; data.train is one data set."""

    def weigh(source: SourceConfig) -> tuple[list[str], float]:
        return [source.path], source.weight

    return [weigh(source) for source in config.sources] or [(config.train, 1.0)]


def _open_index(config: DataConfig, paths: Sequence[str], rules: RowRules) -> RowIndex:
    began_s = time.monotonic()
    files = data_files(paths)
    chunk_bytes = (config.window_mib << 20) // CHUNKS_PER_WINDOW
    index = index_rows(files, rules.columns, chunk_bytes, rules.check_columns)
    _log.info(
        "%s rows of %d files (%s) are streamed in %s chunks; looking at them took %.1f s",
        f"{index.num_rows:,}",
        len(files),
        ", ".join(paths),
        f"{len(index.rows_C):,}",
        time.monotonic() - began_s,
    )
    return index

"""Opens the data sets that a recipe names, by file, folder or glob, as one stream of prompts."""

import logging
import time
from collections.abc import Callable, Sequence

import pyarrow as pa

from mcore_rl.config import DataConfig, SourceConfig
from mcore_rl.data.columns import Columns
from mcore_rl.data.curriculum import Curriculum
from mcore_rl.data.files import data_files
from mcore_rl.data.streamed.index import RowIndex, count_rows, index_rows
from mcore_rl.data.streamed.mixed import MixedPrompts, MixedSource
from mcore_rl.data.streamed.prompts import RowRules, StreamedPrompts
from mcore_rl.data.streamed.windows import CHUNKS_PER_WINDOW, Windows
from mcore_rl.data.streamed.workers import MakeTokenizer, TokenWorkers
from mcore_rl.types.scores import Scores

_log = logging.getLogger(__name__)


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
    named = Columns.make(config.columns)
    rules = RowRules(config.max_prompt_len, config.overlong, config.curriculum.column, named)
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

"""Brings rows of prompt files with other columns into ours, which are verl's.

{"input": "2 + 2 ?", "output": "4"}   --data.columns.preset=nemo_rl-->
{"prompt": [{"role": "user", "content": "2 + 2 ?"}], "reward_model": {"ground_truth": "4"}, ...}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_rl.config import ColumnsConfig
from mcore_rl.data.rows import Row, get_mapping, require

PRESETS: Mapping[str, dict[str, str]] = {
    "verl": {"prompt": "prompt", "answer": "reward_model.ground_truth"},
    "slime": {"prompt": "prompt", "answer": "label", "extra_info": "metadata"},
    "nemo_rl": {"prompt": "input", "answer": "output", "data_source": "task_name"},
    "trl": {"prompt": "prompt", "answer": "solution"},
}
"""Columns of each system's files, where they are not called as the option."""


@dataclass(frozen=True)
class Columns:
    """Where a file has what a prompt is made of; names with dots lie in mappings.

    system        message before prompts that are plain texts; empty: none
    extra         further columns, which extra_info gets
    source_name   data_source of rows without one; empty: each row needs one
    """

    prompt: str = "prompt"
    answer: str = "reward_model.ground_truth"
    images: str = "images"
    videos: str = "videos"
    data_source: str = "data_source"
    extra_info: str = "extra_info"
    system: str = ""
    extra: tuple[str, ...] = ()
    source_name: str = ""

    @staticmethod
    def make(config: ColumnsConfig) -> "Columns":
        """Return the columns of the preset, with those that the recipe names itself."""
        own = {
            "prompt": config.prompt,
            "answer": config.answer,
            "images": config.images,
            "videos": config.videos,
            "data_source": config.data_source,
            "extra_info": config.extra_info,
            "system": config.system,
        }
        named = PRESETS[config.preset] | {name: column for name, column in own.items() if column}
        source_name = "" if config.preset == "verl" else config.preset
        return Columns(**named, extra=tuple(config.extra), source_name=source_name)

    @property
    def are_ours(self) -> bool:
        """Return whether rows stay as they are."""
        return self == OURS

    @property
    def needed(self) -> tuple[str, ...]:
        """Return the columns that every file has."""
        always = (self.prompt, self.answer)
        return always if self.source_name else (self.prompt, self.data_source, self.answer)

    @property
    def optional(self) -> tuple[str, ...]:
        """Return the columns that are read where a file has them."""
        return (self.data_source, self.extra_info, self.images, self.videos, *self.extra)

    def convert(self, row: Row, where: str) -> Row:
        """Return a row in our columns. Raises ValueError if one that is needed is absent."""
        if self.are_ours:
            return row
        extra_info = get_mapping(row, self.extra_info, where)
        return {
            "prompt": self._make_messages(find_value(row, self.prompt, where)),
            "reward_model": {"ground_truth": find_value(row, self.answer, where)},
            "data_source": row.get(self.data_source) or self.source_name or None,
            "extra_info": {**extra_info, **{name: row.get(name) for name in self.extra}},
            "images": _list_of(row.get(self.images)),
            "videos": _list_of(row.get(self.videos)),
        }

    def _make_messages(self, prompt: Any) -> Any:
        if not isinstance(prompt, str):
            return prompt
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": prompt}]


OURS = Columns()


def find_value(row: Row, column: str, where: str) -> Any:
    """Return the value of a column, which may lie in mappings ("reward_model.ground_truth")."""
    *parents, last = column.split(".")
    for name in parents:
        require(row, name, where)
        row = get_mapping(row, name, where)
    return require(row, last, where)


def _list_of(value: Any) -> Any:
    """Return a single image or video as a list of one."""
    return value if value is None or isinstance(value, list) else [value]

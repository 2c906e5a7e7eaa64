"""Options of the prompts that a run trains on: files, mixing, streaming, curriculum, images."""

from dataclasses import dataclass, field, replace
from typing import Literal

from mcore_rl.config.bounds import Options, bounded


@dataclass
class SourceConfig(Options, group="data.sources"):
    """A data set that is mixed with others."""

    path: str = ""
    """A file, folder or glob, as in data.train."""
    weight: float = bounded(1.0, gt=0)
    """Share of the prompts, as a ratio to the sum of all weights."""


@dataclass
class StageConfig(Options, group="data.curriculum.stages"):
    """Difficulties that are drawn once a number of prompts was drawn."""

    after: int = bounded(0, ge=0)
    """Prompts drawn before."""
    least: float | None = None
    """Easier prompts are passed over; None: unbounded."""
    most: float | None = None
    """Harder prompts are passed over; None: unbounded."""


@dataclass
class CurriculumConfig(Options, group="data.curriculum"):
    """Which prompts are drawn earlier, or less often."""

    column: str = ""
    """Number that says how difficult a prompt is, such as extra_info.difficulty; empty: none."""
    stages: list[StageConfig] = field(default_factory=list)
    """Bounds of the difficulty, which move in a straight line from one stage to the next."""
    solved: float = bounded(1.0, gt=0, le=1)
    """Share of later epochs that draw a prompt whose samples were all right the last time."""
    unsolved: float = bounded(1.0, gt=0, le=1)
    """Share of later epochs that draw a prompt whose samples were all wrong the last time."""

    @property
    def by_pass_rate(self) -> bool:
        return self.solved < 1 or self.unsolved < 1

    @property
    def is_used(self) -> bool:
        return bool(self.column) or self.by_pass_rate

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.column) != bool(self.stages):
            raise ValueError(
                f"data.curriculum.column={self.column!r} with {len(self.stages)}"
                " data.curriculum.stages: a column needs stages that bound it, and stages a column;"
                " give both or neither"
            )
        for before, after in zip(self.stages, self.stages[1:], strict=False):
            if before.after >= after.after:
                raise ValueError(
                    f"data.curriculum.stages: after={after.after} follows after={before.after};"
                    " order the stages by the prompts drawn before"
                )
        if self.stages and self.stages[0].after:
            raise ValueError(
                f"data.curriculum.stages: the first has after={self.stages[0].after}; it must have"
                " after=0, or nothing bounds the first prompts"
            )
        for name in ("least", "most"):
            given = [getattr(stage, name) is not None for stage in self.stages]
            if any(given) and not all(given):
                raise ValueError(
                    f"data.curriculum.stages: some have a {name} and some have none, so there is no"
                    f" line between them; give {name} in all stages or in none"
                )
        for stage in self.stages:
            if stage.least is not None and stage.most is not None and stage.least > stage.most:
                raise ValueError(
                    f"data.curriculum.stages: least={stage.least:g} is above most={stage.most:g},"
                    f" after={stage.after}; no difficulty lies between them"
                )


@dataclass
class ImagesConfig(Options, group="data.images"):
    """Images and videos of prompts, for models with a vision tower (docs/vision.md)."""

    bad: Literal["error", "skip"] = "error"
    """A row with an image that cannot be used is refused, or left out and counted."""
    verify: bool = True
    """Decode every image at the start. Otherwise only headers are read, and an image with damage
    behind its header ends the run when its prompt is drawn."""
    shrink: bool = False
    """Shrink the images and videos of a prompt of more than data.max_prompt_len tokens until it
    fits; prompts that do not fit even so are dropped."""
    max_tokens: int = bounded(0, ge=0)
    """Tokens of an image, or of the frames that share a patch of a video; larger ones are shrunk.
    0: the limit of the model's processor."""
    max_pixels: int = bounded(64 << 20, ge=1)
    """Pixels of an image before it is shrunk; one with more cannot be used."""
    max_mib: int = bounded(64, ge=1)
    """Size of an encoded image; a larger one cannot be used."""
    cache_gib: float = bounded(1.0, gt=0)
    """Patches that each node with engines keeps in shared memory for engines and trainer ranks;
    those of other images are made again when they are needed."""


@dataclass
class ColumnsConfig(Options, group="data.columns"):
    """Names of the columns of data.train, data.sources and eval.data (docs/recipes.md)."""

    preset: Literal["verl", "slime", "nemo_rl", "trl"] = "verl"
    """The system for which the files were made; the options below replace single names."""
    prompt: str = ""
    """Question as a text, or a list of chat messages."""
    answer: str = ""
    """Right answer, for the reward, of any type; a dot leads into a mapping."""
    images: str = ""
    """An image or a list of them."""
    videos: str = ""
    """A video or a list of them."""
    data_source: str = ""
    """Name handed to the reward; the preset, if a row has none (verl: each row needs one)."""
    extra_info: str = ""
    """Mapping handed to the reward and to environments."""
    extra: list[str] = field(default_factory=list)
    """Further columns that extra_info gets under their names."""
    system: str = ""
    """System message before prompts that are plain texts; empty: none."""


@dataclass
class DataConfig(Options, group="data"):
    train: list[str] = field(default_factory=list)
    """Prompt files, folders of them, or globs: parquet or jsonl, with verl's columns or those of
    data.columns; local, or files on the Hugging Face hub (docs/recipes.md)."""
    sources: list[SourceConfig] = field(default_factory=list)
    """Data sets to mix by weight, instead of data.train (docs/data.md)."""
    max_prompt_len: int = bounded(512, ge=1)
    """Tokens of a prompt, at most."""
    overlong: Literal["filter", "error"] = "filter"
    """Longer prompts are dropped and counted, or refused."""
    shuffle: bool = True
    """Draw prompts in another order in each epoch; false: in the order of the files."""
    cache_dir: str = ""
    """Folder that keeps tokenized files; empty: mcore_rl/tokens in $XDG_CACHE_HOME or ~/.cache."""
    stream_above: int = bounded(1_000_000, ge=0)
    """Data sets of more rows are streamed; the others are loaded whole."""
    window_mib: int = bounded(8, ge=1, le=65536)
    """Rows among which a streamed data set is shuffled at once; two such windows are in memory."""
    lookahead: int = bounded(1024, ge=1)
    """Prompts of a streamed data set that are tokenized before they are needed."""
    workers: int = bounded(2, ge=0)
    """Processes that tokenize a streamed data set; 0: the controller tokenizes."""
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    images: ImagesConfig = field(default_factory=ImagesConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train and self.sources:
            raise ValueError(
                f"data.train={self.train} and data.sources with {len(self.sources)} entries: there"
                " is one way to name the prompts; set data.train=[]"
            )
        for i, source in enumerate(self.sources):
            if not source.path:
                raise ValueError(
                    f"data.sources[{i}].path is empty: give a file, a folder or a glob"
                )

    def reduce_to(self, file: str, max_prompt_len: int) -> "DataConfig":
        """Return these options with one small file in place of all prompts."""
        return replace(
            self,
            train=[file],
            sources=[],
            columns=ColumnsConfig(),
            curriculum=CurriculumConfig(),
            max_prompt_len=max_prompt_len,
        )

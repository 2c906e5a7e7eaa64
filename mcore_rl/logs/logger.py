"""Sends the metrics and samples of each step to the console, to files and to trackers.

PhaseTimer measures the seconds of each phase of a step. Samples with images are logged with small
copies of the images, which the run folder keeps once each.
"""

import io
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from mcore_rl.logs.alarms.watch import AlarmWatch
from mcore_rl.logs.console import make_console
from mcore_rl.logs.episode_log import EpisodeLog
from mcore_rl.logs.names import add_former_names
from mcore_rl.logs.progress import tell_stage
from mcore_rl.logs.prometheus.server import PrometheusServer
from mcore_rl.logs.rows import RowFile
from mcore_rl.logs.token_rows import TokenTexts, make_token_rows
from mcore_rl.logs.trackers.tracker import Tracker
from mcore_rl.process.clock import now_s
from mcore_rl.process.disk import report_full_disk
from mcore_rl.process.errors import shorten
from mcore_rl.process.lost_samples import SamplesLostError, find_kept
from mcore_rl.process.redaction import redact
from mcore_rl.types import PromptImage, Sample, StoredSample, TurnRecord
from mcore_rl.types.scores import Scores

_log = logging.getLogger(__name__)


class PhaseTimer:
    """Adds the time of `with timer("rollout"): ...` to timer.seconds["rollout"].

    The step starts when the timer is made.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.seconds: dict[str, float] = {}
        self._start = now_s()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        _log.info("step %d: %s", self.step, phase)
        start = now_s()
        try:
            with tell_stage(f"step {self.step}: {phase}"):
                yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now_s() - start

    def metrics(self, waiting: Sequence[str] = ()) -> dict[str, float]:
        """Return time/<phase> of each phase so far and time/step, in wall seconds.

        `waiting` names phases in which the trainer has no work: their share of the step is
        idle/trainer.
        """
        step_s = now_s() - self._start
        metrics = {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        metrics["time/step"] = step_s
        if waiting:
            waiting_s = sum(self.seconds.get(phase, 0.0) for phase in waiting)
            metrics["idle/trainer"] = waiting_s / step_s
        return metrics


FOLDER = "images"
SIDE = 256
"""Pixels of the longer side, at most."""


class Thumbnails:
    """Small copies of images in a run folder: `images/<hash>.png`."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def save(self, image: PromptImage) -> str:
        """Return the path of an image's copy in the run folder, and write it if it is new."""
        path = Path(FOLDER, f"{image.digest[:16]}.png")
        file = self._run_dir / path
        if not file.exists():
            with report_full_disk(file):
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(_shrink(image.data))
        return str(path)


def _shrink(data: bytes) -> bytes:
    from PIL import Image  # runs without images do without it

    with Image.open(io.BytesIO(data)) as opened:
        image = opened.convert("RGB")
    image.thumbnail((SIDE, SIDE))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


SAMPLES_PER_LOG = 64
"""Rows of samples.jsonl per call: all samples of a large run would outgrow its checkpoints."""
FAILED_PER_LOG = 16
"""Further rows per call, of samples whose reward failed: in an outage all fail alike."""
ERROR_CHARS = 2000
"""Most characters of an error in a row."""
_SHOWN_ERRORS = 3
_SHOWN_CHARS = 300


class MetricsLogger:
    """Writes metrics.jsonl and samples.jsonl in `run_dir`, and to the trackers that are asked for.

    last_step    step of the checkpoint that a run continues from: later rows are dropped, so that
                 no row appears twice; None starts the files over
    total_steps  the last step, for the progress on the console
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        last_step: int | None = None,
        total_steps: int | None = None,
        console: bool = True,
        trackers: Sequence[Tracker] = (),
        tracked_samples: int = 0,
        read: Callable[[Sequence[StoredSample]], list[Sample]] | None = None,
        to_texts: TokenTexts | None = None,
        token_samples: int = 0,
        with_episodes: bool = False,
        rotate_bytes: int = 0,
        alarms: AlarmWatch | None = None,
        prometheus: PrometheusServer | None = None,
    ) -> None:
        """Open the files.

        trackers        get each row of metrics, and `tracked_samples` samples of each step; closed
                        with the log
        read            fetches the logged samples from the stores; None: no samples are logged
        to_texts        texts of tokens; token_samples: how many samples of a step are logged with
                        their tokens
        with_episodes   also write episodes.jsonl
        rotate_bytes    size at which a file of rows becomes a segment (RowFile); 0: never
        alarms          tells metrics that are beyond their bounds; closed with the log
        prometheus      serves the last value of each metric; closed with the log
        """
        self._read = read
        self._alarms = alarms
        self._prometheus = prometheus
        self._to_texts = to_texts
        self._token_samples = token_samples if to_texts else 0
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._trackers = trackers
        self._tracked_samples = tracked_samples
        self._metrics = RowFile(self.run_dir / "metrics.jsonl", last_step, rotate_bytes)
        self._samples = RowFile(self.run_dir / "samples.jsonl", last_step, rotate_bytes)
        self._thumbnails = Thumbnails(self.run_dir)
        path = self.run_dir / "episodes.jsonl" if with_episodes else None
        self.episodes = EpisodeLog(path, last_step, rotate_bytes)
        """Where the code that samples episodes notes them."""
        self._console = (
            make_console(sys.stdout, self.run_dir.name, total_steps) if console else None
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one row unless `metrics` is empty; a step may have several rows."""
        if not metrics:
            return
        metrics = {name: float(value) for name, value in metrics.items()}
        kept = add_former_names(metrics)
        self._metrics.write({"step": step, "timestamp": round(time.time(), 3), **kept})
        for tracker in self._trackers:
            tracker.log(step, kept)
        if self._console:
            self._console.show(step, metrics)
        if self._alarms:
            self._alarms.note(step, metrics)
        if self._prometheus:
            states = self._alarms.states if self._alarms else {}
            self._prometheus.note(step, metrics, states)

    def log_samples(
        self, step: int, samples: Sequence[StoredSample], scores: Scores, split: str = "train"
    ) -> None:
        """Write the first SAMPLES_PER_LOG samples, and FAILED_PER_LOG others whose reward failed.

        If more rewards failed than rows are written, a warning counts the failures by error.
        `split` is "train" or "eval", the source of the prompts.
        """
        if split == "train":
            self.episodes.step = step + 1
        errors = scores.errors or [""] * len(samples)
        given = zip(samples, scores.rewards_N, errors, strict=True)
        rows = [
            (sample, _make_score_row(scores, place, error))
            for place, (sample, _, error) in enumerate(given)
        ]
        failed = [row for row in rows[SAMPLES_PER_LOG:] if "reward_error" in row[1]]
        if len(failed) > FAILED_PER_LOG:
            _log.warning("step %d, %s: %s", step, split, summarize_errors(errors))
        rows = rows[:SAMPLES_PER_LOG] + failed[:FAILED_PER_LOG]
        written = [
            _make_sample_row(step, split, sample)
            | score
            | self._save_images(sample)
            | (self._list_tokens(sample) if place < self._token_samples else {})
            for place, (sample, score) in enumerate(self._fetch_samples(rows))
        ]
        self._samples.write(*written)
        if tracked := written[: self._tracked_samples]:
            for tracker in self._trackers:
                tracker.log_samples(step, split, tracked)

    def _list_tokens(self, sample: Sample) -> dict[str, Any]:
        assert self._to_texts is not None
        return {"token_rows": make_token_rows(sample, self._to_texts)}

    def _save_images(self, sample: Sample) -> dict[str, list[str]]:
        """Return the paths of small copies of the images of prompt and episode, each once; nothing
        for a sample of text alone.
        """
        of_turns = sample.episode.images if sample.episode is not None else ()
        images = {image.digest: image for image in (*sample.prompt.images, *of_turns)}
        paths = [self._thumbnails.save(image) for image in images.values()]
        return {"images": paths} if paths else {}

    def _fetch_samples(
        self, rows: Sequence[tuple[StoredSample, dict[str, Any]]]
    ) -> list[tuple[Sample, dict[str, Any]]]:
        """Return (sample, its scores) of the samples that are not lost."""
        assert self._read is not None, "nobody brings the samples here"
        while True:
            samples = [row[0] for row in rows]
            try:
                here = self._read(samples)
            except SamplesLostError as lost:
                _log.warning("%s; they are not in the log of samples", lost)
                rows = [rows[i] for i in find_kept(samples, lost)]
            else:
                return [(sample, row[1]) for sample, row in zip(here, rows, strict=True)]

    def close(self, failed: bool = False) -> None:
        """Close files and console, and tell the trackers whether the run failed."""
        with ExitStack() as parts:
            for tracker in self._trackers:
                parts.callback(tracker.close, failed)
            parts.callback(self._metrics.close)
            parts.callback(self._samples.close)
            parts.callback(self.episodes.close)
            for part in (self._alarms, self._prometheus):
                if part:
                    parts.callback(part.close)
            if self._console:
                parts.callback(self._console.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *rest: object) -> None:
        self.close(failed=exception_type is not None)


def _make_score_row(scores: Scores, place: int, error: str) -> dict[str, Any]:
    """Return the reward of a sample, what it is made of, and what the sample trains with."""
    row: dict[str, Any] = {"reward": scores.rewards_N[place]}
    if scores.parts:
        parts = {name: values[place] for name, values in scores.parts.items()}
        row["parts"] = {name: v if math.isfinite(v) else None for name, v in parts.items()}
    if scores.advantages_N:
        row["advantage"] = scores.advantages_N[place]
    return {**row, "reward_error": shorten(redact(error), ERROR_CHARS)} if error else row


def _make_sample_row(step: int, split: str, sample: Sample) -> dict[str, Any]:
    row = {
        "step": step,
        "split": split,
        "prompt_index": sample.prompt.index,
        "sample_index": sample.sample_index,
        "prompt": "\n".join(message["content"] for message in sample.prompt.messages),
        "response": sample.text,
        "response_len": sample.response_len,
        "ground_truth": sample.prompt.ground_truth,
        "finish_reason": sample.finish_reason,
        "weights": sorted({span.version for span in sample.versions}),
    }
    if sample.prompt.set_name:
        row["set"] = sample.prompt.set_name
    if sample.prompt.adapter:
        row["adapter"] = sample.prompt.adapter
    if sample.episode is not None:
        row["turns"] = [_make_turn_row(turn) for turn in sample.episode.turns]
        row["detail"] = shorten(redact(sample.episode.detail), ERROR_CHARS)
    return row


def summarize_errors(errors: Sequence[str]) -> str:
    """Return one line: how many rewards failed, and the most frequent errors, shortened.

    `errors` has an entry per sample, empty where its reward did not fail.
    """
    shortened: Counter[str] = Counter()
    for error, count in Counter(filter(None, errors)).items():
        shortened[shorten(redact(error), _SHOWN_CHARS)] += count
    shown = [f"{count} with {error}" for error, count in shortened.most_common(_SHOWN_ERRORS)]
    others = len(shortened) - len(shown)
    return (
        f"{shortened.total()} rewards of {len(errors)} failed, {'; '.join(shown)}"
        + (f"; and {others} other errors" if others else "")
        + "; samples.jsonl has the first of them"
    )


def _make_turn_row(turn: TurnRecord) -> dict[str, Any]:
    """Return what was said in a turn; only the tokens of the policy's answers are trained."""
    return {
        "parent": turn.parent,
        "fork": turn.fork,
        "adapter": turn.adapter,
        "versions": list(turn.versions),
        "messages": list(turn.messages),
        "answer": turn.answer,
        "calls": list(turn.calls),
        "tokens": turn.num_tokens,
        "finish_reason": turn.finish_reason,
        "reward": turn.reward,
    }

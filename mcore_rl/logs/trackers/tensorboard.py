"""Event files for TensorBoard in the run folder."""

from collections.abc import Mapping
from pathlib import Path

from mcore_rl.logs.trackers.tracker import Rows, import_tracker
from mcore_rl.process.disk import report_full_disk


class TensorBoard:
    """Event files in <run_dir>/tensorboard; a resume hides steps beyond `last_step`."""

    def __init__(self, run_dir: Path, last_step: int | None) -> None:
        purge_step = 0 if last_step is None else last_step + 1
        option = "log.tensorboard=true"
        module = import_tracker("torch.utils.tensorboard", option, "tensorboard")
        self._folder = run_dir / "tensorboard"
        with report_full_disk(self._folder):
            self._writer = module.SummaryWriter(str(self._folder), purge_step=purge_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with report_full_disk(self._folder):
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def log_samples(self, step: int, split: str, rows: Rows) -> None:
        with report_full_disk(self._folder):
            for number, row in enumerate(rows):
                text = f"reward {row['reward']}\n\n{row['prompt']}\n\n---\n\n{row['response']}"
                self._writer.add_text(f"samples/{split}/{number}", text, step)

    def close(self, failed: bool) -> None:
        with report_full_disk(self._folder):
            self._writer.close()

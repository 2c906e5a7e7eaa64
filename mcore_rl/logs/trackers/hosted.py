"""Weights & Biases, trackio and SwanLab, whose packages have much the same functions."""

from collections.abc import Mapping

from mcore_rl.logs.trackers.tracker import (
    SAMPLE_COLUMNS,
    Rows,
    TrackedRun,
    import_tracker,
    make_table,
)
from mcore_rl.process.disk import write_whole


class WandB:
    """Weights & Biases with `step` as x axis; a resumed run keeps its id (<run_dir>/wandb_id)."""

    def __init__(self, run: TrackedRun, project: str) -> None:
        self._wandb = import_tracker("wandb", f"log.wandb_project={project!r}", "wandb")
        options = run.options
        self._run = self._wandb.init(
            project=project,
            entity=options.entity or None,
            group=options.group or None,
            tags=options.tags or None,
            name=run.name,
            dir=str(run.run_dir),
            config=dict(run.config),
            id=run.read_id("wandb_id"),
            resume="allow",
        )
        write_whole(run.run_dir / "wandb_id", self._run.id)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def log_samples(self, step: int, split: str, rows: Rows) -> None:
        table = self._wandb.Table(columns=list(SAMPLE_COLUMNS), data=make_table(rows))
        self._run.log({f"samples/{split}": table, "step": step})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """trackio, on this machine or in a Space; a resumed run keeps its name."""

    def __init__(self, run: TrackedRun, project: str) -> None:
        self._trackio = import_tracker("trackio", f"log.trackio_project={project!r}", "trackio")
        self._trackio.init(
            project=project,
            name=run.name,
            group=run.options.group or None,
            space_id=run.options.entity or None,
            config=dict(run.config),
            resume="never" if run.last_step is None else "allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log(dict(metrics), step=step)

    def log_samples(self, step: int, split: str, rows: Rows) -> None:
        table = self._trackio.Table(columns=list(SAMPLE_COLUMNS), data=make_table(rows))
        self._trackio.log({f"samples/{split}": table}, step=step)

    def close(self, failed: bool) -> None:
        self._trackio.finish()


class SwanLab:
    """SwanLab; a resumed run keeps its id (<run_dir>/swanlab_id)."""

    def __init__(self, run: TrackedRun, project: str) -> None:
        self._swanlab = import_tracker("swanlab", f"log.swanlab_project={project!r}", "swanlab")
        options = run.options
        self._run = self._swanlab.init(
            project=project,
            workspace=options.entity or None,
            group=options.group or None,
            tags=options.tags or None,
            name=run.name,
            log_dir=str(run.run_dir / "swanlab"),
            config=dict(run.config),
            id=run.read_id("swanlab_id"),
            resume="allow",
        )
        write_whole(run.run_dir / "swanlab_id", self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, split: str, rows: Rows) -> None:
        texts = [
            self._swanlab.Text(
                f"{row['prompt']}\n---\n{row['response']}", caption=f"reward {row['reward']}"
            )
            for row in rows
        ]
        self._run.log({f"samples/{split}": texts}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(state="crashed" if failed else "success")

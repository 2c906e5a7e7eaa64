"""Tells the alarms of a run: on the console, in its log, in alarms.jsonl, and to whom it may be."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from mcore_rl.config.alarms import AlarmsConfig
from mcore_rl.logs.alarms.conditions import AlarmEvent, MetricAlarm, note_first
from mcore_rl.logs.alarms.delivery import AlarmDelivery
from mcore_rl.logs.progress import say
from mcore_rl.logs.rows import RowFile, iter_rows

_log = logging.getLogger(__name__)

MOST_EARLIER = 1000
"""Rows of an earlier launch among which the first values of metrics are looked for."""


class AlarmWatch:
    """The alarms of a run. A resume tells those anew that are still on."""

    def __init__(
        self,
        run_dir: Path,
        alarms: Sequence[MetricAlarm],
        options: AlarmsConfig,
        last_step: int | None = None,
        rotate_bytes: int = 0,
    ) -> None:
        """
        last_step      step of the checkpoint that the run continues from; None: it begins
        rotate_bytes   size at which alarms.jsonl becomes a segment; 0: never
        """
        self._run = run_dir.name
        self._alarms = alarms
        self._delivery = AlarmDelivery(options.webhook, options.command, options.timeout_s)
        if last_step is not None:
            earlier = islice(iter_rows(run_dir / "metrics.jsonl"), MOST_EARLIER)
            note_first(alarms, (row for row in earlier if row["step"] <= last_step))
        self._rows = RowFile(run_dir / "alarms.jsonl", last_step, rotate_bytes)

    @property
    def states(self) -> Mapping[str, bool]:
        """Return which alarms are on, by name."""
        return {alarm.name: alarm.is_on for alarm in self._alarms}

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell what a row of metrics begins or ends."""
        for alarm in self._alarms:
            event = alarm.note(step, metrics)
            if event is not None:
                self._tell(event)

    def close(self) -> None:
        self._delivery.close()
        self._rows.close()

    def _tell(self, event: AlarmEvent) -> None:
        row = asdict(event)
        self._rows.write({"step": event.step, "timestamp": round(time.time(), 3), **row})
        _log.log(logging.WARNING if event.state == "on" else logging.INFO, event.text)
        say(event.text)
        self._delivery.send({"run": self._run, **row, "text": f"{self._run}: {event.text}"})

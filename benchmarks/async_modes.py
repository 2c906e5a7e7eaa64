"""Accuracy, wall time and idle shares of rollout.mode sync, one_step_off and async; the last line is JSON.

All train the quickstart's model on its problems, from one warm start and over seeds, with importance sampling
truncated by token. Wall time is that of the steps after the first, evaluations and start-up left out.
"""

import json
from statistics import fmean

from variants import step_rows, summaries_of, train_variants

CORRECTION = ["algorithm.correction.weight=token"]
MODES = {
    "sync": CORRECTION,
    "one_step_off": ["rollout.mode=one_step_off", *CORRECTION],
    "async": ["rollout.mode=async", "rollout.max_staleness=2", *CORRECTION],
}
MEANS = ("idle/trainer", "idle/engines", "staleness/mean", "staleness/partial", "time/sync")


def main() -> None:
    folders, _ = train_variants(__doc__ or "", MODES, "async_modes")
    print(
        "| mode | before | accuracy after, by seed | seconds, by seed | trainer idle | engines idle |"
    )
    print("|---|---|---|---|---|---|")
    figures = {}
    for mode, of_seeds in folders.items():
        summaries, rows = summaries_of(of_seeds), [step_rows(folder)[1:] for folder in of_seeds]
        means = {name: fmean(row[name] for of_run in rows for row in of_run) for name in MEANS}
        after = [summary["final_accuracy"] for summary in summaries]
        seconds = [sum(row["time/step"] for row in of_run) for of_run in rows]
        before = fmean(summary["warm_start_accuracy"] for summary in summaries)
        print(
            f"| {mode} | {100 * before:.1f} % | {', '.join(f'{100 * a:.1f} %' for a in after)} |"
            f" {', '.join(f'{s:.0f}' for s in seconds)} | {100 * means['idle/trainer']:.0f} % |"
            f" {100 * means['idle/engines']:.0f} % |"
        )
        oldest = max(row["staleness/max"] for of_run in rows for row in of_run)
        figures[mode] = {"after": after, "seconds": seconds, "staleness/max": oldest, **means}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

"""Compares accuracy, wall time and idle shares of rollout.mode sync, one_step_off and async.

All train the quickstart's model on its problems, from one warm start and over seeds, with
importance sampling truncated per token. Wall time is that of the steps after the first, without
evaluations and start-up. The last line is JSON.
"""

import json
from statistics import fmean

from variants import ARITHMETIC, read_summaries, step_rows, train_variants

CORRECTION = ["algorithm.correction.weight=token"]
MODES = {
    "sync": CORRECTION,
    "one_step_off": ["rollout.mode=one_step_off", *CORRECTION],
    "async": ["rollout.mode=async", "rollout.max_staleness=2", *CORRECTION],
}
MEANS = ("idle/trainer", "idle/engines", "staleness/mean", "staleness/partial", "time/sync")


def main() -> None:
    folders, _ = train_variants(__doc__ or "", ARITHMETIC, MODES, "async_modes")
    print("| mode | before | after, by seed | seconds, by seed | trainer idle | engines idle |")
    print("|---|---|---|---|---|---|")
    figures = {}
    for mode, seed_folders in folders.items():
        summaries = read_summaries(seed_folders)
        rows_by_seed = [step_rows(folder)[1:] for folder in seed_folders]
        all_rows = [row for rows in rows_by_seed for row in rows]
        means = {name: fmean(row[name] for row in all_rows) for name in MEANS}
        after = [summary["final_accuracy"] for summary in summaries]
        seconds = [sum(row["time/step"] for row in rows) for rows in rows_by_seed]
        before = fmean(summary["warm_start_accuracy"] for summary in summaries)
        after_text = ", ".join(f"{100 * accuracy:.1f} %" for accuracy in after)
        seconds_text = ", ".join(f"{value:.0f}" for value in seconds)
        print(
            f"| {mode} | {100 * before:.1f} % | {after_text} | {seconds_text} |"
            f" {100 * means['idle/trainer']:.0f} % | {100 * means['idle/engines']:.0f} % |"
        )
        oldest = max(row["staleness/max"] for row in all_rows)
        figures[mode] = {"after": after, "seconds": seconds, "staleness/max": oldest, **means}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

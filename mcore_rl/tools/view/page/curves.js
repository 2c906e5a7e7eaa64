// Curves of metrics, of all shown runs. The first ones are those that tell whether a run learns.
import { Chart, smooth } from "./chart.js";
import { make, makeSelect, show } from "./dom.js";
import { ask, readPlace, shownRuns, writePlace } from "./store.js";

const FIRST = ["reward/mean", "eval/greedy_accuracy", "reward/groups_without_signal",
  "rollout/response_len", "rollout/truncated_share", "loss/entropy", "loss/grad_norm",
  "logprob_diff/mean", "staleness/mean", "time/step", "loss/nll", "preference/accuracy"];

export const HEALTH = ["logprob_diff/mean", "logprob_diff/token_max", "logprob_diff/stale",
  "logprob_diff/router", "logprob_diff/arithmetic", "ratio/token_max", "sync/parity_typical",
  "sync/parity_overall", "sync/seconds", "sync/transfer_seconds", "sync/pause_s", "sync/mib",
  "sync/engines_failed", "sync/engines_verified", "sync/changed_share", "staleness/mean",
  "staleness/max", "staleness/dropped", "router/max_violation_max", "router/idle_share",
  "idle/trainer", "idle/engines"];
const FEW = 12; // points of a series that is not smoothed, such as evaluations
const LIMITS = { "sync/parity_typical": "sync/parity_typical_limit",
  "sync/parity_overall": "sync/parity_overall_limit" };

export class CurveBoard {
  // presets: names of the charts; null: the first ones, and those that a user adds
  constructor(presets = null) {
    this.presets = presets;
    const place = readPlace();
    this.axis = place.x ?? "step";
    this.weight = Number(place.smooth ?? 0.6);
    this.added = new Set((place.charts ?? "").split(",").filter(Boolean));
    this.filter = "";
    this.charts = new Map();
    this.grid = make("div", { className: "grid" });
    this.list = make("div", { className: "metrics" });
    this.element = make("section", {}, this.makeControls(), presets ? null : this.list, this.grid);
  }

  makeControls() {
    const range = make("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: this.weight,
      oninput: (e) => { this.weight = Number(e.target.value); this.draw(); this.keep(); } });
    const search = make("input", { type: "search", placeholder: "find metrics: loss, router ...",
      id: "metric-search", oninput: (e) => { this.filter = e.target.value; this.listNames(); } });
    const axes = [["step", "step"], ["sample", "sample"], ["time", "time"]];
    return make("div", { className: "controls" },
      makeSelect(axes, this.axis, (axis) => { this.axis = axis; this.charts.clear(); this.refresh(); this.keep(); }, "by"),
      make("label", {}, "smoothing ", range), this.presets ? null : search);
  }

  keep() {
    if (this.presets) return;
    writePlace({ ...readPlace(), x: this.axis, smooth: this.weight, charts: [...this.added].join(",") });
  }

  known() {
    return new Set(shownRuns().flatMap((run) => run.metrics));
  }

  wanted() {
    const known = this.known();
    return [...(this.presets ?? FIRST), ...this.added].filter((name, k, all) =>
      known.has(name) && all.indexOf(name) === k);
  }

  listNames() {
    const words = this.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const found = words.length ? [...this.known()].sort().filter((name) =>
      words.every((word) => name.includes(word))) : [];
    const shown = new Set(this.wanted());
    show(this.list, ...found.slice(0, 60).map((name) => make("button", {
      className: shown.has(name) ? "chip on" : "chip",
      onclick: () => {
        if (this.added.has(name)) this.added.delete(name); else this.added.add(name);
        this.keep(); this.listNames(); this.refresh();
      } }, name)), found.length > 60 ? `and ${found.length - 60} more` : null);
  }

  async refresh() {
    const names = this.wanted();
    const runs = shownRuns();
    const extra = names.map((name) => LIMITS[name]).filter(Boolean);
    this.series = await Promise.all(runs.map((run) =>
      ask("series", { run: run.number, names: [...names, ...extra].join(","), x: this.axis })));
    this.runs = runs;
    for (const name of names)
      if (!this.charts.has(name)) this.charts.set(name, new Chart(name, { axis: this.axis }));
    const elements = names.map((name) => this.charts.get(name).element);
    if (!elements.length) elements.push(this.nothing ??= make("p", {}, "No numbers yet."));
    if (elements.length !== this.grid.children.length || elements.some((e, k) => this.grid.children[k] !== e))
      show(this.grid, ...elements);
    this.draw();
  }

  draw() {
    for (const name of this.wanted()) {
      const lines = [];
      this.runs?.forEach((run, k) => {
        const { x = [], y = [] } = this.series[k][name] ?? {};
        const weight = x.length < FEW ? 0 : this.weight;
        const line = { name: run.name, color: run.color, x, y: smooth(y, weight) };
        if (x.length) lines.push(weight ? { ...line, raw: y } : line);
        const limit = this.series[k][LIMITS[name]];
        if (limit?.x.length) lines.push({ ...limit, name: "limit", color: "#e45756", dash: true });
      });
      this.charts.get(name)?.set(lines);
    }
  }
}

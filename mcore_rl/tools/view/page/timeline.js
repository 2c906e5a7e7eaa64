// Phases of steps as spans, and what each engine had to do below them, on one scale of time.
import { Chart } from "./chart.js";
import { formatSeconds, make, makeSelect, show } from "./dom.js";
import { ask, COLORS, shownRuns } from "./store.js";

const PHASES = { "start-up": "#9d755d", rollout: "#4c78a8", reward: "#b279a2", teacher: "#d67195",
  logprobs: "#72b7b2", train: "#f58518", pause: "#8a8a8a", sync: "#54a24b", checkpoint: "#6b5b95",
  evaluation: "#3f8f8f" };

function colorPhase(name) {
  return PHASES[name] ?? "#8a8a8a";
}

export class TimelineView {
  constructor() {
    this.run = shownRuns()[0]?.number ?? 0;
    this.first = "";
    this.last = "";
    this.body = make("div", {});
    const field = (name, title) => make("label", {}, `${title} `, make("input", { type: "number", min: 0,
      onchange: (e) => { this[name] = e.target.value; this.refresh(); } }));
    this.trace = make("a", { className: "button", download: "trace.json" }, "trace.json for ui.perfetto.dev");
    this.element = make("section", {}, make("div", { className: "controls" },
      shownRuns().length > 1 ? makeSelect(shownRuns().map((run) => [run.number, run.name]), this.run,
        (run) => { this.run = Number(run); this.refresh(); }, "run") : null,
      field("first", "steps from"), field("last", "to"), this.trace), this.body);
  }

  async refresh() {
    this.trace.href = `/api/trace?run=${this.run}`;
    const answer = await ask("timeline", { run: this.run, first_step: this.first, last_step: this.last });
    const phases = answer.phases;
    if (!phases.length) { show(this.body, make("p", {}, "No phases in logs/controller.log yet.")); return; }
    const start = phases[0].start_s, end = phases.at(-1).end_s;
    const totals = new Map();
    for (const phase of phases) totals.set(phase.name, (totals.get(phase.name) ?? 0) + phase.end_s - phase.start_s);
    show(this.body,
      make("p", { className: "faint" }, `steps ${answer.first_step} to ${answer.last_step}, ${formatSeconds(end - start)}`),
      make("div", { className: "controls" }, ...[...totals].map(([name, seconds]) => make("span", {},
        make("span", { className: "dot", style: { background: colorPhase(name) } }), `${name} ${formatSeconds(seconds)}`))),
      this.makeLane(phases, start, end), ...this.makeEngines(answer.engines, start, end));
  }

  makeLane(phases, start, end) {
    const share = (seconds) => `${100 * seconds / (end - start || 1)}%`;
    return make("div", { className: "lane", id: "phases" }, ...phases.map((phase) => make("div", {
      className: "span", title: `step ${phase.step} ${phase.name}: ${formatSeconds(phase.end_s - phase.start_s)}`,
      style: { left: share(phase.start_s - start), width: share(phase.end_s - phase.start_s), background: colorPhase(phase.name) },
    }, `${phase.step} ${phase.name}`)));
  }

  makeEngines(engines, start, end) {
    return Object.entries(engines).filter(([, loads]) => loads.length).map(([name, loads]) => {
      const x = [0, ...loads.map((load) => load.time_s - start), end - start];
      const line = (title, key, color) => ({ name: title, color, x, y: [null, ...loads.map((load) => load[key]), null] });
      const chart = new Chart(`${name}: requests`, { axis: "time", height: 110 });
      chart.set([line("running", "running", COLORS[0]), line("queued", "queued", COLORS[1])]);
      return chart.element;
    });
  }
}

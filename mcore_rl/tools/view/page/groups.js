// The samples of a step by prompt: their rewards beside one another, and their advantages.
import { formatNumber, make, makeSelect, makeTable, show } from "./dom.js";
import { ask, readPlace, shownRuns, writePlace } from "./store.js";

export class GroupsView {
  constructor() {
    const place = readPlace();
    this.run = Number(place.run ?? shownRuns()[0]?.number ?? 0);
    this.step = place.step ? Number(place.step) : null;
    this.split = place.split || "train";
    this.body = make("div", {});
    this.field = make("input", { type: "number", min: 0, id: "group-step",
      onchange: (e) => this.go(Number(e.target.value)) });
    const turn = (by) => () => this.go(Math.max(0, this.shownStep() + by));
    this.element = make("section", {}, make("div", { className: "controls" },
      shownRuns().length > 1 ? makeSelect(shownRuns().map((run) => [run.number, run.name]), this.run,
        (run) => { this.run = Number(run); this.refresh(); }, "run") : null,
      make("label", {}, "step ", this.field), make("button", { onclick: turn(-1) }, "before"),
      make("button", { onclick: turn(1) }, "after"),
      makeSelect([["train", "train"], ["eval", "eval"]], this.split, (split) => { this.split = split; this.refresh(); }, "split")),
    this.body);
  }

  shownStep() { return this.step ?? shownRuns().find((run) => run.number === this.run)?.last_step ?? 0; }

  go(step) {
    this.step = step;
    writePlace({ tab: "groups", run: this.run, step, split: this.split });
    return this.refresh();
  }

  async refresh() {
    const step = this.shownStep();
    if (document.activeElement !== this.field) this.field.value = step;
    const { groups } = await ask("groups", { run: this.run, step, split: this.split });
    const equal = groups.filter((group) => group.std === 0).length;
    show(this.body, make("p", { className: "faint", id: "groups-found" },
      `${groups.length} groups are logged of step ${step}, ${equal} with equal rewards, which train nothing.`),
    ...groups.map((group) => this.makeGroup(group)));
  }

  makeGroup(group) {
    const parts = [...new Set(group.samples.flatMap((sample) => Object.keys(sample.parts)))];
    const hasAdvantage = group.samples.some((sample) => sample.advantage !== null);
    const heads = ["reward", ...parts, hasAdvantage ? "advantage" : "(reward - mean) / std", "end", "response"];
    const rows = group.samples.map((sample) => {
      const advantage = hasAdvantage ? sample.advantage : sample.relative;
      return make("tr", { className: "row", onclick: () => document.dispatchEvent(new CustomEvent("open-tab",
        { detail: { tab: "samples", run: this.run, sample: sample.number, prompt: group.prompt_index } })) },
      make("td", { className: "number" }, formatNumber(sample.reward)),
      ...parts.map((name) => make("td", { className: "number" }, formatNumber(sample.parts[name]))),
      make("td", { className: `number ${advantage > 0 ? "good" : advantage < 0 ? "bad" : ""}` }, formatNumber(advantage)),
      make("td", {}, sample.finish_reason ?? ""), make("td", { className: "text" }, sample.response));
    });
    return make("section", { className: "group" },
      make("h2", {}, `prompt ${group.prompt_index}: mean ${formatNumber(group.mean)}, std ${formatNumber(group.std)}`),
      make("div", { className: "text-block faint" }, group.prompt), makeTable(heads, rows));
  }
}

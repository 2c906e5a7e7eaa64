// A table of samples that can be filtered, searched and sorted; a click shows a whole sample.
import { showSample } from "./detail.js";
import { formatNumber, make, makeSelect, makeTable, show } from "./dom.js";
import { ask, readPlace, shownRuns, writePlace } from "./store.js";

const PER_PAGE = 50;
const TYPED_MS = 100;
const FIELDS = ["run", "sort", "split", "reason", "text", "first_step", "last_step", "min_reward",
  "max_reward", "min_length", "max_length", "prompt", "truncated", "failed", "with_tokens"];
const COLUMNS = [["step", "step"], ["prompt", "prompt"], ["reward", "reward"], ["length", "length"],
  [null, "end"], [null, "prompt ..."], [null, "response"]];

export class SamplesView {
  constructor() {
    const place = readPlace();
    this.query = Object.fromEntries(FIELDS.map((name) => [name, place[name] ?? ""]));
    this.query.sort ||= "-step";
    this.query.run ||= String(shownRuns()[0]?.number ?? 0);
    this.page = 0;
    this.chosen = place.sample;
    this.controls = make("div", { className: "controls" });
    this.summary = make("p", { className: "faint", id: "found" });
    this.table = make("div", { className: "scroll" });
    this.detail = make("div", { className: "detail" }, "Choose a sample.");
    this.element = make("section", {}, this.controls, this.summary,
      make("div", { className: "split" }, make("div", {}, this.table, this.makePager()), this.detail));
    this.showControls();
    if (this.chosen !== undefined) this.choose(Number(this.chosen));
  }

  get run() { return shownRuns().find((run) => String(run.number) === this.query.run) ?? shownRuns()[0]; }

  showControls() {
    const run = this.run;
    if (!run) return;
    this.known = JSON.stringify([run.splits, run.reasons, run.length_unit]);
    const all = (names) => [["", "any"], ...names.map((name) => [name, name])];
    const set = (name) => (value) => this.change({ [name]: value });
    show(this.controls,
      make("input", { type: "search", id: "text", placeholder: "text of prompt or response",
        value: this.query.text, oninput: (e) => this.type("text", e.target.value) }),
      shownRuns().length > 1 ? makeSelect(shownRuns().map((each) => [each.number, each.name]),
        this.query.run, (value) => { this.change({ run: value, sample: "" }); this.showControls(); }, "run") : null,
      makeSelect(all(run.splits), this.query.split, set("split"), "split"),
      makeSelect(all(run.reasons), this.query.reason, set("reason"), "end"),
      this.makeBounds("reward", "min_reward", "max_reward"),
      this.makeBounds(run.length_unit, "min_length", "max_length"),
      this.makeBounds("step", "first_step", "last_step"), this.makePrompt(),
      this.makeBox("truncated", "truncated"), this.makeBox("failed", "reward failed"),
      this.makeBox("with_tokens", "with tokens"));
  }

  makeBounds(title, low, high) {
    const field = (name, hint) => make("input", { type: "number", step: "any", id: name, placeholder: hint,
      value: this.query[name], oninput: (e) => this.type(name, e.target.value) });
    return make("span", {}, `${title} `, field(low, "from"), " ", field(high, "to"));
  }

  makePrompt() {
    return make("label", {}, "prompt ", make("input", { type: "number", min: 0, id: "prompt",
      value: this.query.prompt, oninput: (e) => this.type("prompt", e.target.value) }));
  }

  makeBox(name, title) {
    return make("label", {}, make("input", { type: "checkbox", id: name, checked: this.query[name] === "true",
      onchange: (e) => this.change({ [name]: e.target.checked ? "true" : "" }) }), ` ${title}`);
  }

  makePager() {
    this.position = make("span", { className: "faint" });
    const turn = (by) => () => { this.page = Math.max(0, this.page + by); this.refresh(); };
    return make("p", { className: "controls" }, make("button", { onclick: turn(-1) }, "newer"),
      make("button", { onclick: turn(1), id: "next-page" }, "older"), this.position);
  }

  type(name, value) {
    this.query[name] = value;
    clearTimeout(this.typing);
    this.typing = setTimeout(() => this.change({}), TYPED_MS);
  }

  change(values) {
    Object.assign(this.query, values);
    this.page = 0;
    this.keep();
    return this.refresh();
  }

  keep() {
    writePlace({ tab: "samples", ...this.query, sample: this.chosen });
  }

  async refresh() {
    if (!this.run) return;
    if (this.known !== JSON.stringify([this.run.splits, this.run.reasons, this.run.length_unit])) this.showControls();
    this.query.run = String(this.run.number);
    const turn = this.turn = (this.turn ?? 0) + 1;
    const answer = await ask("samples", { ...this.query, first: this.page * PER_PAGE, number: PER_PAGE });
    if (turn !== this.turn) return;
    this.showRows(answer);
    if (answer.num_searched < answer.num_rows) this.refresh(); // the search goes on where it was
  }

  showRows(answer) {
    const searched = answer.num_searched < answer.num_rows
      ? `, ${Math.floor(100 * answer.num_searched / answer.num_rows)} % searched so far` : "";
    this.summary.textContent = `${answer.total} of ${answer.num_rows} logged samples, mean reward `
      + `${formatNumber(answer.mean_reward)}${searched}`;
    this.summary.dataset.total = answer.total;
    const last = Math.min(answer.total, (this.page + 1) * PER_PAGE);
    this.position.textContent = `${answer.total ? this.page * PER_PAGE + 1 : 0} to ${last} of ${answer.total}`;
    const heads = COLUMNS.map(([key, title]) => make("th", {
      className: key ? "sort" : "", onclick: () => key && this.sortBy(key) },
      title + (this.query.sort === key ? " ↑" : this.query.sort === `-${key}` ? " ↓" : "")));
    show(this.table, makeTable(heads, answer.rows.map((row) => this.makeRow(row)), { id: "samples" }));
  }

  sortBy(key) {
    this.change({ sort: this.query.sort === `-${key}` ? key : `-${key}` });
  }

  makeRow(row) {
    const reward = row.reward_error ? make("span", { className: "bad", title: row.reward_error }, "failed")
      : formatNumber(row.reward);
    return make("tr", { className: row.number === this.chosen ? "row on" : "row",
      onclick: () => this.choose(row.number) },
    make("td", { className: "number" }, `${row.step}${row.split === "eval" ? " eval" : ""}`),
    make("td", { className: "number" }, String(row.prompt_index ?? "")),
    make("td", { className: "number" }, reward),
    make("td", { className: "number" }, `${row.length}${row.turns ? ` / ${row.turns} turns` : ""}`),
    make("td", { className: "end" }, row.finish_reason ?? "", row.has_tokens ? make("span", { className: "faint", title: "has tokens" }, " ●") : null),
    make("td", { className: "text" }, row.prompt), make("td", { className: "text" }, row.response));
  }

  async choose(number) {
    this.chosen = number;
    this.keep();
    const run = Number(this.query.run || 0);
    const row = await ask("sample", { run, sample: number });
    showSample(this.detail, row, run);
    for (const each of this.table.querySelectorAll("tr.on")) each.classList.remove("on");
  }
}

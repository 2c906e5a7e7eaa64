// The options of runs beside one another and beside the defaults; those that differ come first.
import { make, makeTable, show } from "./dom.js";
import { ask, shownRuns } from "./store.js";

export class ConfigView {
  constructor() {
    this.filter = "";
    this.isAll = false;
    this.body = make("div", {});
    this.element = make("section", {}, make("div", { className: "controls" },
      make("input", { type: "search", placeholder: "find options", id: "option-search",
        oninput: (e) => { this.filter = e.target.value.toLowerCase(); this.draw(); } }),
      make("label", {}, make("input", { type: "checkbox", id: "all-options",
        onchange: (e) => { this.isAll = e.target.checked; this.draw(); } }), " all options")), this.body);
  }

  async refresh() {
    this.rows = (await ask("config")).rows;
    this.draw();
  }

  draw() {
    const runs = shownRuns();
    const places = runs.map((run) => run.number);
    const rows = (this.rows ?? []).filter((row) => {
      const values = places.map((place) => row.values[place]);
      const compared = runs.length > 1 ? values : [...values, row.values.at(-1)];
      return (this.isAll || new Set(compared).size > 1) && row.option.toLowerCase().includes(this.filter);
    });
    const said = runs.length > 1 ? "options that differ between the runs" : "options that differ from the defaults";
    show(this.body, make("p", { className: "faint" }, `${rows.length} ${this.isAll ? "options" : said}`),
      makeTable(["option", ...runs.map((run) => run.name), "default"], rows.map((row) => this.makeRow(row, places)), { id: "options" }));
  }

  makeRow(row, places) {
    const usual = row.values.at(-1);
    return make("tr", {}, make("td", {}, row.option), ...places.map((place) => make("td", {
      className: row.values[place] === usual ? "" : "good" }, row.values[place] ?? "–")), make("td", { className: "faint" }, usual ?? "–"));
  }
}

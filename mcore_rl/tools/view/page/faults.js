// What went wrong and what was done about it: the controller's warnings, and counts by step.
import { formatNumber, formatTime, make, makeTable, show } from "./dom.js";
import { ask, shownRuns } from "./store.js";

export class FaultsView {
  constructor() {
    this.element = make("section", {});
  }

  async refresh() {
    const runs = shownRuns();
    const answers = await Promise.all(runs.map((run) => ask("faults", { run: run.number })));
    show(this.element, ...answers.flatMap((answer, k) => this.makeRun(runs[k], answer, runs.length > 1)));
  }

  makeRun(run, answer, isNamed) {
    const launches = answer.records.filter((record) => record.text === "start-up").length;
    const ends = Object.entries(answer.ends).map(([name, number]) => `${name} ${number}`).join(", ");
    const told = answer.records.length > launches || answer.steps.length;
    return [
      isNamed ? make("h2", {}, run.name) : null,
      make("p", { className: told ? "faint" : "good" }, told ? `${launches} launches` : `No warning and no error in ${launches} launches.`),
      answer.num_bad ? make("p", { className: "bad" }, `${answer.num_bad} lines of the logs are no JSON`) : null,
      ends ? make("p", {}, `Episodes ended: ${ends}`) : null,
      answer.records.length ? makeTable(["time", "", "what"], answer.records.map((record) => make("tr", {},
        make("td", { className: "number" }, formatTime(record.time_s)),
        make("td", { className: record.level === "ERROR" ? "bad" : "" }, record.text === "start-up" ? "launch" : record.level.toLowerCase()),
        make("td", { className: "text-block" }, record.text))), { className: "records" }) : null,
      answer.steps.length ? make("h2", {}, "By step") : null,
      answer.steps.length ? makeTable(["step", "number", "what", "metric"], answer.steps.map((row) => make("tr", {},
        make("td", { className: "number" }, String(row.step)), make("td", { className: "number" }, formatNumber(row.value)),
        make("td", {}, row.text), make("td", { className: "faint" }, row.metric)))) : null,
    ];
  }
}

// What `mcore-rl plan` predicts of each kind of rank, beside the most memory that ranks had.
import { make, show } from "./dom.js";
import { ask, COLORS, shownRuns } from "./store.js";

const GIB = 2 ** 30;

export class MemoryView {
  constructor() {
    this.element = make("section", {}, make("p", { className: "faint" }, "planning ..."));
    this.planned = new Map();
  }

  async refresh() {
    const parts = await Promise.all(shownRuns().map(async (run) => {
      const answer = await ask("memory", { run: run.number });
      return [make("h2", {}, run.name), ...this.makeRun(answer)];
    }));
    show(this.element, ...parts.flat());
  }

  makeRun({ plan, error, peak_gib: peak }) {
    const seen = make("p", {}, peak === null ? "This run logged no GPU memory (train/peak_memory_gib_max): it has no GPU, or no step yet."
      : `Most memory of a trainer rank's tensors so far: ${peak.toFixed(2)} GiB.`);
    if (error) return [seen, make("p", { className: "bad" }, `No plan: ${error}`)];
    const largest = Math.max(...plan.memory.map((rank) => rank.bytes), (peak ?? 0) * GIB);
    return [seen, make("p", { className: plan.fits ? "good" : "bad" }, plan.verdict),
      ...plan.memory.flatMap((rank) => [
        make("div", {}, `${rank.who}, at their ${rank.moment}: ${(rank.bytes / GIB).toFixed(2)} GiB planned`),
        this.makeMeter(rank, largest),
        rank.who.startsWith("trainer") && peak !== null ? this.makePeak(peak, largest) : null]),
      ...plan.explained.map((line) => make("p", { className: "faint" }, line))];
  }

  makeMeter(rank, largest) {
    const uses = Object.entries(rank.uses).filter(([, size]) => size > 0).sort((a, b) => b[1] - a[1]);
    return make("div", {}, make("div", { className: "meter" }, ...uses.map(([what, size], k) => make("div", {
      title: `${what}: ${(size / GIB).toFixed(2)} GiB`, style: { width: `${100 * size / largest}%`, background: COLORS[k % COLORS.length] } }))),
    make("p", { className: "faint" }, ...uses.map(([what, size], k) => make("span", { style: { marginRight: "1em" } },
      make("span", { className: "dot", style: { background: COLORS[k % COLORS.length] } }), `${what} ${(size / GIB).toFixed(2)}`))));
  }

  makePeak(peak, largest) {
    return make("div", {}, make("div", {}, `measured: ${peak.toFixed(2)} GiB`), make("div", { className: "meter" },
      make("div", { style: { width: `${100 * peak * GIB / largest}%`, background: "var(--ink)" } })));
  }
}

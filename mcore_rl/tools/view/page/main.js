// Shows the tabs and keeps their views up to date while runs write.
import { ConfigView } from "./config.js";
import { CurveBoard, HEALTH } from "./curves.js";
import { make, show } from "./dom.js";
import { FaultsView } from "./faults.js";
import { GroupsView } from "./groups.js";
import { MemoryView } from "./memory.js";
import { SamplesView } from "./samples.js";
import { ask, COLORS, readPlace, state, writePlace } from "./store.js";
import { TimelineView } from "./timeline.js";

const EVERY_MS = 2000;
const TABS = {
  curves: ["Curves", () => new CurveBoard()],
  samples: ["Samples", () => new SamplesView()],
  groups: ["Groups", () => new GroupsView()],
  timeline: ["Timeline", () => new TimelineView()],
  health: ["Sync and drift", () => new CurveBoard(HEALTH)],
  faults: ["Faults", () => new FaultsView()],
  memory: ["Memory", () => new MemoryView()],
  config: ["Options", () => new ConfigView()],
};
let current = null;
let seen = "";

function describeRun(run) {
  const steps = run.steps ? ` of ${run.steps}` : "";
  return `${run.name}: step ${run.last_step}${steps}, ${run.num_samples} samples${run.is_indexed ? "" : " (reading ...)"}`;
}

function showHead() {
  show(document.getElementById("runs"), ...state.runs.map((run, number) =>
    make("label", { className: "run", title: run.path },
      make("input", { type: "checkbox", checked: !state.hidden.has(number), onchange: (e) => {
        if (e.target.checked) state.hidden.delete(number); else state.hidden.add(number);
        current?.refresh();
      } }),
      make("span", { className: "dot", style: { background: COLORS[number % COLORS.length] } }),
      describeRun(run))));
  const tab = readPlace().tab;
  show(document.getElementById("tabs"), ...Object.entries(TABS).map(([name, [title]]) =>
    make("button", { role: "tab", id: `tab-${name}`, className: name === tab ? "on" : "",
      "aria-selected": String(name === tab), onclick: () => openTab({ tab: name }) }, title)));
}

export function openTab(place) {
  writePlace({ ...(place.tab === readPlace().tab ? readPlace() : {}), ...place });
  const name = readPlace().tab in TABS ? readPlace().tab : "curves";
  current = TABS[name][1]();
  showHead();
  show(document.getElementById("view"), current.element);
  return attempt(() => current.refresh());
}

async function attempt(work) {
  const status = document.getElementById("state");
  try {
    await work();
    status.textContent = "";
  } catch (error) {
    status.textContent = error instanceof TypeError && String(error).includes("fetch")
      ? "the server has ended" : error.message;
  }
}

async function look() {
  const answer = await ask("runs");
  state.runs = answer.runs;
  const now = JSON.stringify(answer.runs.map((run) =>
    [run.num_metric_rows, run.num_samples, run.last_step, run.is_indexed]));
  const isNew = now !== seen;
  seen = now;
  if (!isNew) return;
  showHead();
  if (current) await current.refresh();
}

document.addEventListener("open-tab", (event) => openTab(event.detail));
window.addEventListener("hashchange", () => openTab(readPlace()));
await attempt(look);
await openTab(readPlace());
document.body.dataset.ready = "yes";
setInterval(() => { if (!document.hidden) attempt(look); }, EVERY_MS);

// Asks the server, and keeps what all views share: the runs, which of them are shown, the tab.

export const COLORS = ["#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2", "#9d755d", "#72b7b2",
  "#eeca3b"];

export const state = {
  runs: [],
  hidden: new Set(),
  run: 0,
};

export async function ask(path, query = {}) {
  const wanted = Object.entries(query).filter(([, value]) =>
    value !== "" && value !== null && value !== undefined && value !== false);
  const text = new URLSearchParams(wanted.map(([name, value]) =>
    [name, value === true ? "1" : String(value)]));
  const answer = await fetch(`/api/${path}?${text}`);
  if (answer.status === 401) throw new Error("the key is not valid any more: open the printed address");
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.error);
  return value;
}

export function shownRuns() {
  return state.runs.map((run, number) => ({ ...run, number, color: COLORS[number % COLORS.length] }))
    .filter((run) => !state.hidden.has(run.number));
}

// What the address holds after #: the tab, and what its view needs to come back to the same place.
export function readPlace() {
  const place = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  return { tab: "curves", ...place };
}

export function writePlace(place) {
  const kept = Object.entries(place).filter(([, value]) => value !== "" && value !== undefined);
  const hash = `#${new URLSearchParams(kept)}`;
  if (hash !== location.hash) history.replaceState(null, "", hash);
}

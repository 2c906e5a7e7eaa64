// A whole sample: prompt, turns with their tool calls, images, rewards, and tokens in colors.
import { formatNumber, make, makeSelect, show } from "./dom.js";
import { COLORS } from "./store.js";

const PALE = 0.75;
let shading = "logprob";

export function showSample(parent, row, run) {
  const facts = [`step ${row.step} ${row.split}`, `prompt ${row.prompt_index}`,
    row.sample_index === undefined ? "" : `sample ${row.sample_index}`, `end: ${row.finish_reason}`,
    `weights ${(row.weights ?? []).join(", ")}`];
  show(parent,
    make("p", { className: "faint" }, facts.filter(Boolean).join(" · ")),
    makeRewards(row),
    row.detail ? makeBlock("detail", row.detail, "bad") : null,
    row.images?.length ? make("div", { className: "images" }, ...row.images.map((path) =>
      make("img", { src: `/image?${new URLSearchParams({ run, path })}`, alt: path, title: path }))) : null,
    ...(row.turns?.length ? makeTurns(row.turns) : [makeBlock("prompt", row.prompt), makeBlock("response", row.response)]),
    makeBlock("ground truth", typeof row.ground_truth === "string" ? row.ground_truth : JSON.stringify(row.ground_truth)),
    makeTokens(row.token_rows));
}

function makeBlock(title, text, kind = "") {
  return make("div", {}, make("div", { className: "role" }, title),
    make("div", { className: `text-block ${kind}` }, text ?? ""));
}

function makeRewards(row) {
  const parts = Object.entries(row.parts ?? {}).map(([name, value]) => `${name} ${formatNumber(value)}`);
  const said = [`reward ${formatNumber(row.reward)}`];
  if (row.advantage !== undefined) said.push(`advantage ${formatNumber(row.advantage)}`);
  return make("div", {}, make("b", {}, said.join(" · ")),
    parts.length ? ` made of ${parts.join(", ")}` : "",
    row.reward_error ? make("div", { className: "text-block bad" }, row.reward_error) : null);
}

// Messages may be text, or parts of text and images; anything else is shown as JSON.
function readContent(content) {
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return content ? JSON.stringify(content) : "";
  return content.map((part) => part.text ?? `[${part.type}]`).join("");
}

function makeMessage(message, note = "") {
  const calls = (message.tool_calls ?? []).map((call) => {
    const asked = call.function ?? call;
    const given = typeof asked.arguments === "string" ? asked.arguments : JSON.stringify(asked.arguments);
    return make("div", { className: "text-block" }, make("span", { className: "role" }, "calls "), `${asked.name}(${given})`);
  });
  const thought = message.reasoning_content ?? message.reasoning;
  return make("div", { className: `turn ${message.role}` },
    make("div", { className: "role" }, `${message.role}${note}`),
    thought ? make("div", { className: "text-block faint" }, thought) : null,
    make("div", { className: "text-block" }, readContent(message.content)), ...calls);
}

function makeTurns(turns) {
  return turns.flatMap((turn, number) => {
    const statuses = turn.calls?.length ? ` · calls: ${turn.calls.join(", ")}` : "";
    const after = turn.parent === number - 1 || turn.parent === null ? "" : ` · follows turn ${turn.parent + 1}`;
    const fork = turn.fork ? ` · fork: ${turn.fork}` : "";
    const adapter = turn.adapter ? ` · answered by ${turn.adapter}` : "";
    const note = ` · turn ${number + 1} · ${turn.tokens} tokens · ${turn.finish_reason} · reward `
      + `${formatNumber(turn.reward)}${statuses}${after}${fork}${adapter}`;
    return [...turn.messages.map((message) => makeMessage(message)), makeMessage(turn.answer, note)];
  });
}

// Blue: sure; red: unlikely. -5 nats and less are the reddest.
function colorLogprob(logprob) {
  const share = Math.min(1, -logprob / 5);
  return `hsl(${210 - 205 * share} 75% ${50 + 5 * share}% / ${0.2 + 0.5 * share})`;
}

function findValue(spans, place) {
  const span = spans.find(([start, stop]) => start <= place && place < stop);
  return span ? span[2] : null;
}

function makeTokens(rows) {
  if (!rows?.length)
    return make("p", { className: "faint" }, "No tokens of this sample were logged (log.token_samples).");
  const body = make("div", {});
  const draw = () => show(body, ...rows.map(makeTokenRow));
  draw();
  const modes = [["logprob", "log-prob"], ["version", "weight version"], ["turn", "turn"], ["mask", "mask only"]];
  return make("div", { id: "tokens" }, make("h2", {}, "Tokens"),
    make("div", { className: "controls" },
      makeSelect(modes, shading, (mode) => { shading = mode; draw(); }, "color by"),
      make("span", { className: "faint" }, "pale: not trained")), body);
}

function makeTokenRow(row, number, rows) {
  const tokens = make("div", { className: "tokens" });
  const versions = [...new Set(row.versions.map(([, , version]) => version))];
  let next = 0;
  row.texts.forEach((text, place) => {
    const turn = findValue(row.trained, place);
    if (turn === null) {
      tokens.append(make("span", { className: "token untrained", title: "not trained" }, text), make("wbr"));
      return;
    }
    const logprob = row.logprobs[next++], version = findValue(row.versions, place);
    const span = make("span", { className: "token", title:
      `log-prob ${formatNumber(logprob)} (p ${formatNumber(Math.exp(logprob))}), weights ${version}, turn ${turn + 1}` }, text);
    const colors = { logprob: colorLogprob(logprob), version: pick(versions.indexOf(version)), turn: pick(turn) };
    span.style.background = colors[shading] ?? "color-mix(in srgb, var(--accent) 25%, transparent)";
    span.dataset.version = version;
    tokens.append(span, make("wbr")); // a line breaks between tokens, which may have no blanks
  });
  const left = row.cut ? make("p", { className: "faint" }, `and ${row.cut} tokens more`) : null;
  const title = rows.length > 1 ? make("div", { className: "role" }, `row ${number + 1} of ${rows.length}`) : null;
  return make("div", {}, title, tokens, left);
}

function pick(number) {
  return `color-mix(in srgb, ${COLORS[number % COLORS.length]} ${100 * (1 - PALE) + 20}%, transparent)`;
}

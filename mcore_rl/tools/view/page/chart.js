// Draws lines on a canvas: axes, a legend by color, the values below the pointer.
import { formatNumber, formatSeconds, make } from "./dom.js";

const LEFT = 56, RIGHT = 10, TOP = 8, BOTTOM = 22;

// Exponential moving average without its bias towards the first value; weight 0: the values.
export function smooth(values, weight) {
  if (!weight) return values;
  let mean = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

export function findTicks(low, high, most) {
  const span = high - low;
  const rough = span / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find((factor) => factor * power >= rough) ?? 10);
  const ticks = [], first = Math.ceil(low / step - 1e-9);
  for (let k = 0; k <= 2 * most && (first + k) * step <= high + 1e-9 * span; k++) ticks.push((first + k) * step);
  return ticks;
}

// lines: [{name, color, x: [...], y: [...], raw: [...]|undefined, dash: bool}]
export class Chart {
  constructor(title, { axis = "step", height = 170 } = {}) {
    this.axis = axis;
    this.height = height;
    this.lines = [];
    this.canvas = make("canvas", { height });
    this.readout = make("span", { className: "readout" });
    this.element = make("figure", { className: "chart" },
      make("figcaption", { title }, make("b", {}, title), " ", this.readout), this.canvas);
    this.element.dataset.metric = title;
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  set(lines) {
    this.lines = lines;
    this.draw();
  }

  bounds() {
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const line of this.lines) {
      for (const x of line.x) { if (x < x0) x0 = x; if (x > x1) x1 = x; }
      for (const values of [line.y, line.raw ?? []])
        for (const y of values) if (y !== null) { if (y < y0) y0 = y; if (y > y1) y1 = y; }
    }
    if (x0 > x1) [x0, x1] = [0, 1];
    if (y0 > y1) [y0, y1] = [0, 1];
    if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
    const isFlat = y1 - y0 < 1e-9 * Math.max(Math.abs(y0), Math.abs(y1));
    const margin = (isFlat ? 0 : (y1 - y0) * 0.06) || Math.abs(y0) * 0.1 || 0.5;
    return [x0, x1, y0 - margin, y1 + margin];
  }

  draw() {
    const width = this.element.clientWidth - 2;
    if (width < 50) return;
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = width * scale;
    this.canvas.height = this.height * scale;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${this.height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    const [x0, x1, y0, y1] = this.bounds();
    this.toX = (x) => LEFT + (x - x0) / (x1 - x0) * (width - LEFT - RIGHT);
    this.toY = (y) => this.height - BOTTOM - (y - y0) / (y1 - y0) * (this.height - TOP - BOTTOM);
    this.drawAxes(pen, width, [x0, x1, y0, y1]);
    for (const line of this.lines) {
      if (line.raw) this.drawLine(pen, line.x, line.raw, line, 0.25, 1);
      this.drawLine(pen, line.x, line.y, line, 1, 1.6);
    }
    this.image = pen.getImageData(0, 0, this.canvas.width, this.canvas.height);
  }

  drawAxes(pen, width, [x0, x1, y0, y1]) {
    const style = getComputedStyle(document.body);
    const [ink, grid] = [style.getPropertyValue("--faint"), style.getPropertyValue("--grid")];
    pen.font = "10px system-ui, sans-serif";
    pen.fillStyle = ink;
    pen.strokeStyle = grid;
    pen.lineWidth = 1;
    pen.textAlign = "right";
    for (const tick of findTicks(y0, y1, 4)) {
      const y = Math.round(this.toY(tick)) + 0.5;
      pen.beginPath(); pen.moveTo(LEFT, y); pen.lineTo(width - RIGHT, y); pen.stroke();
      pen.fillText(formatNumber(Number(tick.toPrecision(6))), LEFT - 5, y + 3);
    }
    pen.textAlign = "center";
    for (const tick of findTicks(x0, x1, 5))
      pen.fillText(this.showX(Number(tick.toPrecision(6))), this.toX(tick), this.height - 7);
  }

  drawLine(pen, xs, ys, line, alpha, width) {
    pen.globalAlpha = alpha;
    pen.strokeStyle = pen.fillStyle = line.color;
    pen.lineWidth = width;
    pen.setLineDash(line.dash ? [5, 4] : []);
    pen.beginPath();
    let isOn = false, num = 0;
    ys.forEach((y, k) => {
      if (y === null) { isOn = false; return; }
      pen[isOn ? "lineTo" : "moveTo"](this.toX(xs[k]), this.toY(y));
      isOn = true; num++;
    });
    pen.stroke();
    pen.setLineDash([]);
    if (num < 40 && !line.dash) ys.forEach((y, k) => {
      if (y === null) return;
      pen.beginPath(); pen.arc(this.toX(xs[k]), this.toY(y), 1.8, 0, 7); pen.fill();
    });
    pen.globalAlpha = 1;
  }

  showX(x) {
    return this.axis === "time" ? formatSeconds(x) : formatNumber(x);
  }

  point(at) {
    const pen = this.canvas.getContext("2d");
    if (this.image) pen.putImageData(this.image, 0, 0);
    if (at === null || !this.toX) { this.readout.textContent = ""; return; }
    const parts = [];
    let shownX = null;
    for (const line of this.lines) {
      let best = -1, distance = Infinity;
      line.x.forEach((x, k) => {
        const d = Math.abs(this.toX(x) - at);
        if (d < distance) [distance, best] = [d, k];
      });
      if (best < 0) continue;
      shownX = line.x[best];
      const value = (line.raw ?? line.y)[best];
      parts.push(`${this.lines.length > 1 ? `${line.name} ` : ""}${formatNumber(value)}`);
      if (value !== null) {
        pen.fillStyle = line.color;
        pen.beginPath(); pen.arc(this.toX(shownX), this.toY(value), 3, 0, 7); pen.fill();
      }
    }
    this.readout.textContent = shownX === null ? "" : `${this.axis} ${this.showX(shownX)}: ${parts.join(" · ")}`;
  }
}

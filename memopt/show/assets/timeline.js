// Memory over the step: the rows of the account on top of each other, the other schedule as an outline.
const MARGIN = { left: 70, right: 20, top: 18, ribbon: 22, bottom: 26 };
const HEIGHT = 380;
let shown = null; // what was drawn last: axes, and the moment that each pixel column shows

/** Where each moment begins on the axis; the last entry is the end of the optimizer's step, which is not to scale. */
function edgesOf(held) {
  const edges = new Float64Array(held.count + 2);
  const byTime = state.scale === "time";
  const least = held.micros / 5000; // so that operators without a time can be pointed at
  let now = 0;
  for (let at = 0; at < held.count; at++) {
    edges[at] = byTime ? Math.max(held.start[at], now) : at;
    now = edges[at] + (held.start[at + 1] === held.start[at] ? least / 50 : 0);
  }
  edges[held.count] = byTime ? Math.max(held.micros, now) : held.count;
  edges[held.count + 1] = edges[held.count] * 1.035;
  return edges;
}

/** For each pixel column the moment in it that holds the most; columns without a moment of their own have the last. */
function columns(held, edges, x, width) {
  const at = new Int32Array(width).fill(-1);
  for (let moment = 0; moment <= held.count; moment++) {
    const from = Math.max(0, Math.floor(x(edges[moment])));
    const to = Math.min(width - 1, Math.floor(x(edges[moment + 1])));
    for (let column = from; column <= to; column++) {
      if (at[column] < 0 || held.total[moment] > held.total[at[column]]) at[column] = moment;
    }
  }
  return at;
}

function drawTimeline() {
  if (!step) return;
  const place = byId("chart");
  const width = Math.max(320, place.clientWidth);
  const inner = width - MARGIN.left - MARGIN.right;
  const held = memory();
  const other = memories[state.which === "planned" ? "plain" : "planned"];
  const edges = edgesOf(held);
  const otherEdges = edgesOf(other);
  const end = Math.max(edges[held.count + 1], otherEdges[other.count + 1]);
  const [from, to] = state.zoom ?? [0, end];
  const x = (value) => ((value - from) / (to - from)) * inner;
  const own = columns(held, edges, x, inner);
  const others = columns(other, otherEdges, x, inner);
  const visible = [...own].filter((moment) => moment >= 0).map((moment) => held.total[moment]);
  const top = [...others].filter((moment) => moment >= 0).map((moment) => other.total[moment]);
  const highest = Math.max(...visible, ...top, 1);
  const withBudget = plan.budget < 1.7 * highest;
  const most = Math.max(highest, withBudget ? plan.budget : 0) * 1.06;
  const floor = HEIGHT - MARGIN.bottom - MARGIN.ribbon;
  const y = (bytes) => floor - (bytes / most) * (floor - MARGIN.top);
  shown = { held, edges, x, y, own, from, to, inner, end, width, floor };
  const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT });
  picture.append(
    ...yAxis(y, most, width),
    ...bands(held, own, y),
    outline(other, others, y),
    ...halves(held, edges, x, inner),
  );
  picture.append(...ribbon(held, edges, x, inner), ...xAxis(from, to, x, inner));
  if (withBudget)
    picture.append(
      svg("line", {
        class: "limit",
        x1: MARGIN.left,
        x2: width - MARGIN.right,
        y1: y(plan.budget),
        y2: y(plan.budget),
      }),
    );
  picture.append(svg("g", { id: "ranges" }), svg("g", { id: "marks" }));
  place.replaceChildren(picture);
  byId("reset").disabled = state.zoom === null;
  drawRanges();
  drawMarks();
}

function yAxis(y, most, width) {
  return byteTicks(most, 8).flatMap((bytes) => [
    svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(bytes), y2: y(bytes) }),
    svg("text", { x: MARGIN.left - 10, y: y(bytes) + 4, "text-anchor": "end" }, bytes ? size(bytes) : "0"),
  ]);
}

function xAxis(from, to, x, inner) {
  const label = state.scale === "time" ? (at) => (at ? duration(at) : "0") : (at) => at.toLocaleString("en");
  return ticks(from, to, Math.max(2, inner / 130)).map((at) =>
    svg("text", { x: MARGIN.left + x(at), y: HEIGHT - 6, "text-anchor": "middle" }, label(at)),
  );
}

/** One area for each kind of bytes, from the bottom up. */
function bands(held, own, y) {
  const base = new Float64Array(own.length);
  const areas = [];
  KINDS.forEach(([name], kind) => {
    let up = "";
    let down = "";
    let any = false;
    for (let column = 0; column < own.length; column++) {
      const bytes = own[column] < 0 ? 0 : held.bands[kind][own[column]];
      const left = MARGIN.left + column;
      down = `L${left + 1} ${y(base[column]).toFixed(1)}L${left} ${y(base[column]).toFixed(1)}${down}`;
      base[column] += bytes;
      const height = y(base[column]).toFixed(1);
      up += `L${left} ${height}L${left + 1} ${height}`;
      any ||= bytes > 0;
    }
    if (any)
      areas.push(svg("path", { d: `M${up.slice(1)}${down}Z`, fill: colourOf(name), "data-kind": name }));
  });
  return areas;
}

function outline(other, others, y) {
  let line = "";
  for (let column = 0; column < others.length; column++) {
    if (others[column] < 0) continue;
    const height = y(other.total[others[column]]).toFixed(1);
    line += `${line ? "L" : "M"}${MARGIN.left + column} ${height}L${MARGIN.left + column + 1} ${height}`;
  }
  return svg("path", { class: "other", d: line || "M0 0" });
}

/** Where the backward and the optimizer's step begin. */
function halves(held, edges, x, inner) {
  return [
    ["backward", edges[held.boundary]],
    ["optimizer", edges[held.count]],
  ].flatMap(([name, at]) => {
    const left = x(at);
    if (left < 0 || left > inner) return [];
    const end = left > inner - 70;
    return [
      svg("line", {
        class: "half",
        x1: MARGIN.left + left,
        x2: MARGIN.left + left,
        y1: 4,
        y2: HEIGHT - MARGIN.bottom,
      }),
      svg(
        "text",
        { x: MARGIN.left + left + (end ? -5 : 5), y: 12, "text-anchor": end ? "end" : "start" },
        name,
      ),
    ];
  });
}

/** The part of the model that runs, below the picture. */
function ribbon(held, edges, x, inner) {
  const parts = [];
  let begin = 0;
  for (let at = 1; at <= held.count; at++) {
    if (at < held.count && partOf(moduleOf(held.op[at])) === partOf(moduleOf(held.op[begin]))) continue;
    const left = Math.max(0, x(edges[begin]));
    const right = Math.min(inner, x(edges[at]));
    if (right - left >= 2) parts.push([partOf(moduleOf(held.op[begin])), left, right]);
    begin = at;
  }
  return parts
    .flatMap(([name, left, right], number) => [
      svg("rect", {
        class: `block${number % 2 ? " odd" : ""}`,
        x: MARGIN.left + left,
        width: right - left,
        y: HEIGHT - MARGIN.bottom - MARGIN.ribbon + 4,
        height: MARGIN.ribbon - 6,
      }),
      right - left > 7 * short(name).length + 8
        ? svg(
            "text",
            { x: MARGIN.left + (left + right) / 2, y: HEIGHT - MARGIN.bottom - 6, "text-anchor": "middle" },
            short(name),
          )
        : "",
    ])
    .filter(Boolean);
}

/** The block that a module lies in, or the module itself outside of blocks. */
function partOf(path) {
  const block = path.match(/^.*?\.\d+(?=\.|$)/);
  return block ? block[0] : path.split(".").slice(0, 2).join(".");
}

function short(path) {
  return path.split(".").slice(-2).join(".") || "(model)";
}

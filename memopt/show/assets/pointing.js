// The mouse and the keys on the timeline: the moment under the pointer, the one that was kept, the zoom.
/** The live ranges of the operator whose story is told. */
function drawRanges() {
  if (!shown) return;
  const { held, edges, x, inner, floor } = shown;
  const marks = rangesOf(held, state.op).map((range) => {
    const left = Math.max(0, x(edges[held.ranges.first[range]]));
    const right = Math.min(inner, x(edges[held.ranges.last[range] + 1]));
    return right <= left
      ? ""
      : svg("rect", {
          class: "range",
          x: MARGIN.left + left,
          width: Math.max(2, right - left),
          y: MARGIN.top,
          height: floor - MARGIN.top,
        });
  });
  byId("ranges").replaceChildren(...marks.filter(Boolean));
}

function rangesOf(held, op) {
  if (op === null) return [];
  return held.ranges.op.flatMap((own, range) => (own === op ? [range] : []));
}

/** The moment that was kept, and the one under the pointer. */
function drawMarks() {
  if (!shown) return;
  const { held, edges, x, y, inner } = shown;
  const marks = [
    [state.pinned, "pin"],
    [state.moment, "cursor"],
  ].flatMap(([moment, name]) => {
    if (moment === null || moment > held.count) return [];
    const left = x((edges[moment] + edges[moment + 1]) / 2);
    if (left < 0 || left > inner) return [];
    return [
      svg("line", {
        class: name,
        x1: MARGIN.left + left,
        x2: MARGIN.left + left,
        y1: MARGIN.top,
        y2: HEIGHT - MARGIN.bottom,
      }),
      svg("circle", {
        class: `dot${name === "pin" ? " pinned" : ""}`,
        cx: MARGIN.left + left,
        cy: y(held.total[moment]),
        r: 4,
      }),
    ];
  });
  byId("marks").replaceChildren(...marks);
}

function momentAt(event) {
  const column = Math.floor(event.clientX - byId("chart").getBoundingClientRect().left - MARGIN.left);
  const inside = Math.max(0, Math.min(shown.own.length - 1, column));
  return shown.own[inside] < 0 ? null : shown.own[inside];
}

function startTimeline() {
  const place = byId("chart");
  let drag = null;
  const left = (event) => event.clientX - place.getBoundingClientRect().left - MARGIN.left;
  place.addEventListener("pointerdown", (event) => {
    drag = left(event);
    place.setPointerCapture(event.pointerId);
  });
  place.addEventListener("pointermove", (event) => {
    change({ moment: momentAt(event) });
    showMoment(event.clientX, event.clientY);
    if (drag !== null && Math.abs(left(event) - drag) > 4) drawZoom(drag, left(event));
  });
  place.addEventListener("pointerup", (event) => {
    if (drag === null) return;
    const [a, b] = [drag, left(event)]
      .sort((one, two) => one - two)
      .map((at) => Math.max(0, Math.min(shown.inner, at)));
    drag = null;
    if (b - a > 4) {
      const back = (at) => shown.from + (at / shown.inner) * (shown.to - shown.from);
      change({ zoom: [back(a), back(b)], moment: null });
    } else change({ pinned: momentAt(event) });
    drawMarks();
  });
  place.addEventListener("pointerleave", () => {
    change({ moment: null });
    hideTip();
  });
  place.addEventListener("dblclick", () => change({ zoom: null }));
  place.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) change({ pinned: Math.max(0, Math.min(memory().count, (state.pinned ?? memory().peak) + by)) });
    else if (event.key === "Escape") change({ pinned: null, zoom: null });
    else return;
    event.preventDefault();
  });
  byId("reset").addEventListener("click", () => change({ zoom: null }));
  byId("to-peak").addEventListener("click", () => change({ pinned: memory().peak, zoom: null }));
  new ResizeObserver(drawTimeline).observe(place);
}

function drawZoom(a, b) {
  const { floor } = shown;
  const from = MARGIN.left + Math.max(0, Math.min(a, b));
  byId("marks").append(
    svg("rect", {
      class: "zoom",
      x: from,
      width: Math.abs(b - a),
      y: MARGIN.top,
      height: floor - MARGIN.top,
    }),
  );
}

function drawControls() {
  const count = (name) => size(memories[name].total[memories[name].peak]);
  choice(
    byId("which"),
    [
      ["planned", `Planned, ${count("planned")}`],
      ["plain", `Nothing recomputed, ${count("plain")}`],
    ],
    state.which,
    (which) => change({ which, pinned: null, moment: null, zoom: null }),
  );
  choice(
    byId("scale"),
    [
      ["time", "By time"],
      ["order", "By operator"],
    ],
    state.scale,
    (scale) => change({ scale, zoom: null }),
  );
  const used = KINDS.filter((_, kind) => memory().bands[kind].some((bytes) => bytes > 0));
  const outlined = state.which === "planned" ? "nothing recomputed" : "planned";
  const colours = new Map();
  for (const [name, colour] of used)
    colours.set(colour, [...(colours.get(colour) ?? []), name === "other" ? "other rows" : name]);
  byId("legend").replaceChildren(
    ...[...colours].map(([colour, names]) =>
      el("span", {}, el("i", { class: "swatch", style: `background:var(--k-${colour})` }), names.join(", ")),
    ),
    el("span", {}, el("i", { class: "outline" }), outlined),
    el("span", {}, el("i", { class: "dash" }), `budget ${size(plan.budget)}`),
  );
}

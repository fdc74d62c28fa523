// All that is known of one operator, beside the page; its live ranges are marked in the timeline meanwhile.
function drawStory() {
  const place = byId("story");
  place.hidden = state.op === null;
  document.body.classList.toggle("told", state.op !== null);
  if (state.op === null) return;
  const op = state.op;
  const fate = text("fate", op);
  const bytes = ops.bytes[op];
  const facts = [
    ["operator", el("span", { class: "mono" }, text("operator", op))],
    ["module", moduleOf(op) || "(model)"],
    ["half", text("half", op)],
    ["value", el("span", { class: "mono" }, text("value", op))],
    ["memory", bytes ? size(bytes) : "none of its own"],
    ["one run", duration(ops.micros[op])],
    ["fate", [el("b", {}, fate), data.why[fate] ? `: ${data.why[fate]}` : ""]],
    [
      "runs",
      ops.again[op] ? `${ops.again[op] + 1} times; recomputed ${many(ops.again[op], "time")}` : "once",
    ],
    ...stays(op),
    ...changesOf(op),
  ];
  const code = text("code", op);
  place.replaceChildren(
    el("h2", { class: "mono" }, ops.name[op]),
    el(
      "button",
      { class: "close", type: "button", "aria-label": "Close", onclick: () => change({ op: null }) },
      "×",
    ),
    el("dl", {}, ...facts.flatMap(([name, ...value]) => [el("dt", {}, name), el("dd", {}, ...value)])),
    text("source", op) ? el("div", { class: "soft" }, text("source", op)) : "",
    code ? el("pre", {}, code) : "",
  );
}

/** When its result is in memory, for both schedules. */
function stays(op) {
  return [
    ["planned", "live, planned"],
    ["plain", "live, plain"],
  ].flatMap(([name, label]) => {
    const held = memories[name];
    const spans = rangesOf(held, op).map((range) => {
      const [first, last] = [held.ranges.first[range], held.ranges.last[range]];
      const until = last + 1 < held.count ? held.start[last + 1] : held.micros;
      return `${size(held.ranges.bytes[range])} from ${duration(held.start[first]).replace("–", "0")} to ${duration(until)}`;
    });
    return spans.length ? [[label, ...spans.map((span) => el("div", {}, span))]] : [];
  });
}

function changesOf(op) {
  const name = ops.name[op];
  return data.diff.flatMap((section) =>
    section.rows.flatMap((row) =>
      row.changes
        .filter((one) => texts[one[0]] === name && texts[one[1]] === moduleOf(op))
        .map((one) => [
          row.kind,
          [texts[one[5]], texts[one[6]], texts[one[7]] ? `read in the backward of ${texts[one[7]]}` : ""]
            .filter(Boolean)
            .join("; ") || row.facts,
        ]),
    ),
  );
}

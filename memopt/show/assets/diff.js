// What the plan changes: rows as in plan.diff(), each with the changes that it combines below it.
const OP_OF_NAME = new Map(step ? ops.name.map((name, number) => [name, number]) : []);
const KIND_LABELS = {
  dtype: "in another dtype",
  cast: "with operands cast",
  "saved as": "saved in fewer bits",
};
const opened = new Set();

function changeText([op, module, , , , detail, reason, readers]) {
  return `${texts[op]} ${texts[module]} ${texts[detail]} ${texts[reason]} ${texts[readers]}`;
}

function rowMatches(row, query) {
  if (state.kinds.size && !state.kinds.has(row.kind)) return false;
  if (!query) return true;
  const words =
    `${row.module} ${row.label} ${row.names} ${row.facts} ${row.source} ${row.code}`.toLowerCase();
  return words.includes(query) || row.changes.some((one) => changeText(one).toLowerCase().includes(query));
}

function drawKinds() {
  const counts = new Map();
  for (const section of data.diff)
    for (const row of section.rows)
      for (const one of row.changes)
        counts.set(
          row.kind,
          (counts.get(row.kind) ?? 0) +
            Math.max(1, row.kind === "recomputed" || row.kind === "offloaded" ? one[4] : 1),
        );
  const toggle = (kind) => {
    const kinds = new Set(state.kinds);
    if (!kinds.delete(kind)) kinds.add(kind);
    change({ kinds });
  };
  byId("kinds").replaceChildren(
    ...[...counts].map(([kind, count]) =>
      el(
        "button",
        { type: "button", "aria-pressed": String(state.kinds.has(kind)), onclick: () => toggle(kind) },
        `${count.toLocaleString("en")} ${KIND_LABELS[kind] ?? kind}`,
      ),
    ),
  );
}

function drawDiff() {
  drawKinds();
  const query = state.query.toLowerCase();
  const parts = data.diff.flatMap((section, at) => {
    let before = null;
    const rows = section.rows.flatMap((row, number) => {
      if (!rowMatches(row, query)) return [];
      const named = row.module !== before;
      before = row.module;
      return diffRow(row, `${at}.${number}`, named);
    });
    return rows.length
      ? [section.title ? el("h3", {}, section.title) : el("h3", {}, "Outside of blocks"), ...rows]
      : [];
  });
  const none = data.diff.length ? "No change matches." : "The plan changes nothing in the captured step.";
  byId("diff").replaceChildren(...(parts.length ? parts : [el("p", { class: "empty" }, none)]));
}

function diffRow(row, key, named) {
  const open = opened.has(key);
  const line = el(
    "button",
    {
      class: "row",
      type: "button",
      "aria-expanded": String(open),
      onclick: () => {
        if (!opened.delete(key)) opened.add(key);
        drawDiff();
      },
    },
    el("span", { class: "arrow" }, "›"),
    el("span", { class: "where" }, named ? row.module : ""),
    el("span", { class: `kind kind-${row.kind.split(" ")[0]}` }, `${row.sign} ${row.label}`.trim()),
    el(
      "span",
      {},
      el("span", { class: "mono" }, row.names),
      row.facts ? el("span", { class: "soft" }, `: ${row.facts}`) : "",
    ),
    el(
      "span",
      { class: "src mono", title: `${row.source}  ${row.code}` },
      el("b", {}, row.source.split("/").at(-1)),
      row.code,
    ),
  );
  return open ? [line, el("div", { class: "inner" }, changesTable(row))] : [line];
}

function changesTable(row) {
  const rows = row.changes.map(([op, module, bytes, micros, times, detail, reason, readers]) => {
    const number = OP_OF_NAME.get(texts[op]);
    const why = [texts[detail], texts[reason], texts[readers] ? `for the backward of ${texts[readers]}` : ""]
      .filter(Boolean)
      .join("; ");
    return el(
      "tr",
      {
        class: number === undefined ? null : "can",
        onclick: () => number !== undefined && change({ op: number }),
      },
      el("td", { class: "mono" }, texts[op]),
      el("td", {}, texts[module] || "(model)"),
      el("td", { class: "n" }, bytes ? size(bytes) : ""),
      el("td", { class: "n" }, micros ? duration(micros) : ""),
      el("td", { class: "n" }, times || ""),
      el("td", { class: "soft" }, why),
    );
  });
  const titles = ["op", "module", "bytes", "time", "times"].map((title, at) =>
    el("th", { class: at > 1 ? "n" : null }, title),
  );
  return el(
    "table",
    {},
    el("thead", {}, el("tr", {}, ...titles, el("th", {}, "why"))),
    el("tbody", {}, ...rows),
  );
}

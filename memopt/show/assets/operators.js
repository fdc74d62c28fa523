// The table of the operators that match the search, the largest first or as sorted.
const SHOWN = 60;
const COLUMNS = [
  ["op", (op) => ops.name[op], false],
  ["module", moduleOf, false],
  ["half", (op) => text("half", op), false],
  ["fate", (op) => text("fate", op), false],
  ["value", (op) => text("value", op), false],
  ["bytes", (op) => ops.bytes[op], true],
  ["one run", (op) => ops.micros[op], true],
  ["runs", (op) => ops.again[op] + 1, true],
];
let sortedBy = 5;
let upwards = false;
let rowsShown = SHOWN;

function opText(op) {
  return `${ops.name[op]} ${text("operator", op)} ${moduleOf(op)} ${text("fate", op)} ${text("code", op)} ${text("source", op)}`.toLowerCase();
}

/** The operators that match all words of a query, in the order of the graph. */
function matching(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const found = [];
  for (let op = 0; op < ops.name.length; op++) {
    if (!words.length || words.every((word) => opText(op).includes(word))) found.push(op);
  }
  return found;
}

function drawOperators() {
  const found = matching(state.query);
  const [, value, isNumber] = COLUMNS[sortedBy];
  const sign = upwards ? 1 : -1;
  found.sort((a, b) => sign * (isNumber ? value(a) - value(b) : value(a).localeCompare(value(b))));
  byId("operators-lead").textContent = state.query
    ? `${many(found.length, "operator")} of ${ops.name.length.toLocaleString("en")} match “${state.query}”.`
    : `${many(ops.name.length, "operator")} in the captured step. Choose one to see all that is known of it.`;
  const sort = (at) => {
    upwards = at === sortedBy ? !upwards : !COLUMNS[at][2];
    sortedBy = at;
    drawOperators();
  };
  const titles = COLUMNS.map(([title, , number], at) =>
    el(
      "th",
      {
        class: number ? "n" : null,
        "aria-sort": at === sortedBy ? (upwards ? "ascending" : "descending") : null,
      },
      el(
        "button",
        { class: "quiet", type: "button", style: "padding:0", onclick: () => sort(at) },
        title + (at === sortedBy ? (upwards ? " ↑" : " ↓") : ""),
      ),
    ),
  );
  const rows = found
    .slice(0, rowsShown)
    .map((op) =>
      el(
        "tr",
        { class: "can", onclick: () => change({ op }) },
        el("td", { class: "mono" }, ops.name[op]),
        el("td", {}, moduleOf(op) || "(model)"),
        el("td", { class: "soft" }, text("half", op)),
        el("td", {}, text("fate", op)),
        el("td", { class: "mono soft" }, shorten(text("value", op))),
        el("td", { class: "n" }, size(ops.bytes[op])),
        el("td", { class: "n" }, duration(ops.micros[op])),
        el("td", { class: "n" }, ops.again[op] + 1),
      ),
    );
  const more =
    found.length > rowsShown
      ? el(
          "button",
          {
            class: "more",
            type: "button",
            onclick: () => {
              rowsShown += 10 * SHOWN;
              drawOperators();
            },
          },
          `Show more of ${found.length.toLocaleString("en")}`,
        )
      : "";
  byId("table").replaceChildren(
    el("table", {}, el("thead", {}, el("tr", {}, ...titles)), el("tbody", {}, ...rows)),
    more,
  );
}

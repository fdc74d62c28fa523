// The precision map: one square for each operator of the forward, equal blocks are shown once.
const DTYPES = { f64: "#8a4fa3", f32: "#4178b0", bf16: "#4f9f85", f16: "#c98b2b", f8: "#c4577f" };

function dtypeColour(dtype) {
  const known = Object.keys(DTYPES).find((name) => dtype.startsWith(name));
  return DTYPES[known] ?? "#8893a1";
}

function typedOps() {
  const { name, operator, module, dtype, reason } = step.types;
  return name.map((_, at) => ({
    name: texts[name[at]],
    operator: texts[operator[at]],
    module: texts[module[at]],
    dtype: texts[dtype[at]],
    reason: texts[reason[at]],
  }));
}

/** Rows by block, in the order of the forward; neighbours with the same operators and dtypes are one row. */
function typeRows(found) {
  const parts = new Map();
  for (const one of found) {
    const part = partOf(one.module);
    if (!parts.has(part)) parts.set(part, []);
    parts.get(part).push(one);
  }
  const rows = [];
  for (const [part, cells] of parts) {
    const same = cells
      .map((one) => `${one.operator} ${one.dtype} ${one.module.slice(part.length)}`)
      .join("|");
    const last = rows.at(-1);
    if (last && last.same === same && /\.\d+$/.test(part)) last.last = part;
    else rows.push({ first: part, last: part, cells, same });
  }
  return rows;
}

function drawTypes() {
  const found = typedOps();
  const counts = new Map();
  for (const one of found) counts.set(one.dtype, (counts.get(one.dtype) ?? 0) + 1);
  byId("dtypes").replaceChildren(
    ...[...counts]
      .sort((a, b) => b[1] - a[1])
      .map(([dtype, count]) =>
        el(
          "span",
          {},
          el("i", { class: "swatch", style: `background:${dtypeColour(dtype)}` }),
          `${dtype}, ${many(count, "operator")}`,
        ),
      ),
  );
  byId("types").replaceChildren(
    ...typeRows(found).map((row) =>
      el(
        "div",
        { class: "line" },
        el(
          "span",
          {},
          (row.first || "(model)") +
            (row.last === row.first ? "" : ` to ${row.last.split(".").slice(-2).join(".")}`),
        ),
        el("span", { class: "cells" }, ...row.cells.map(cell)),
      ),
    ),
  );
}

function cell(one) {
  const square = el("i", { style: `background:${dtypeColour(one.dtype)}`, "data-name": one.name });
  square.addEventListener("pointermove", (event) =>
    showTip(
      event.clientX,
      event.clientY,
      el("b", {}, one.dtype),
      ` ${one.name}`,
      el("div", { class: "soft" }, one.module || "(model)"),
      one.reason ? el("div", {}, one.reason) : "",
    ),
  );
  square.addEventListener("pointerleave", hideTip);
  return square;
}

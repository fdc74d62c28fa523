// The plan in figures: the peak within the budget, every row of it, what each lever brought, and the notes.
function drawSummary() {
  const micros = plan.seconds * 1e6;
  const within = plan.planned.peak / plan.budget;
  const first = beforeAll();
  byId("what").textContent = `${plan.model} on ${plan.hardware}`;
  byId("headline").textContent = `${plan.model} trains within ${size(plan.budget)} on ${plan.hardware}`;
  const figures = [
    [size(plan.planned.peak), `peak, ${share(within)} of the budget`, "lead-figure"],
    first.peak > plan.plain.peak
      ? [
          size(first.peak),
          `peak ${first.name === "plain step" ? "of the plain step" : first.name}; ${size(plan.plain.peak)} with all levers but nothing recomputed`,
        ]
      : [size(plan.plain.peak), "peak with nothing recomputed"],
    [
      `+${share(plan.added + plan.own)}`,
      `time added to ${duration(micros)}${plan.own < 0.0005 ? "" : `, including ${share(plan.own)} for Dynamo's guards and memopt's Python code`}; no plan adds less than ${share(plan.bound + plan.own)}`,
    ],
  ];
  if (plan.moved)
    figures.push([size(plan.host), `of the host's memory; ${size(plan.moved)} a step go there and back`]);
  byId("figures").replaceChildren(
    ...figures.map(([value, label, name]) =>
      el("div", { class: name }, el("b", {}, value), el("span", {}, label)),
    ),
  );
  drawBudget();
  drawReceipt();
  byId("notes").replaceChildren(
    plan.notes.length ? el("h2", {}, "Notes") : "",
    ...plan.notes.map((note) => el("p", { class: "note" }, note)),
    step
      ? ""
      : el(
          "p",
          { class: "note" },
          "This plan was loaded from a file, without its graphs: memory over the step, modules and changes are shown for plans that memopt.plan has made.",
        ),
    el("p", { class: "note" }, `Found by: ${plan.method}. Bytes are counted; times are by the time model: measured steps took ${plan.measured.join(" to ")} times as long.`),
  );
}

/** The step that the plan is compared with, before any lever: the plain step, where it was counted. */
function beforeAll() {
  const [name, peak] = plan.receipt[0] ?? ["nothing recomputed", plan.plain.peak];
  return { name, peak };
}

/** A bar for each peak: of the plain step, with nothing recomputed, and of the plan; the budget stands across them. */
function drawBudget() {
  const first = beforeAll();
  const whole = Math.max(first.peak, plan.plain.peak, plan.planned.peak);
  const limit = plan.budget / whole;
  const bars = [
    ["nothing recomputed", plan.plain],
    ["planned", plan.planned],
  ].map(([label, peak]) => [
    el("span", { class: "soft" }, label),
    el(
      "div",
      { class: "track" },
      ...ordered(peak.rows).map(([name, bytes]) =>
        el("i", {
          style: `width:${(100 * bytes) / whole}%;background:${colourOf(name)}`,
          title: `${name}: ${size(bytes)}`,
          "data-row": name,
        }),
      ),
      limit <= 1 ? el("span", { class: "limit", style: `left:${100 * limit}%` }) : "",
    ),
    el("span", { class: "end" }, size(peak.peak)),
  ]);
  if (first.peak > plan.plain.peak) {
    const bar = el("i", {
      style: `width:${(100 * first.peak) / whole}%;background:var(--shade)`,
      title: `${first.name}: ${size(first.peak)}`,
    });
    const across = limit <= 1 ? el("span", { class: "limit", style: `left:${100 * limit}%` }) : "";
    bars.unshift([
      el("span", { class: "soft" }, first.name),
      el("div", { class: "track" }, bar, across),
      el("span", { class: "end" }, size(first.peak)),
    ]);
  }
  const said =
    limit <= 1
      ? el(
          "span",
          { style: `left:${Math.min(94, Math.max(6, 100 * limit))}%` },
          `budget ${size(plan.budget)}`,
        )
      : "";
  byId("budget").replaceChildren(
    el("div", { class: "stack" }, ...bars.flat(), el("div", { class: "scale" }, said)),
  );
}

function ordered(rows) {
  return rows.filter(([, bytes]) => bytes > 0).sort((a, b) => kindNumber(a[0]) - kindNumber(b[0]));
}

function drawReceipt() {
  const plain = new Map(plan.plain.rows);
  const planned = new Map(plan.planned.rows);
  const names = [...new Set([...plain.keys(), ...planned.keys()])];
  const most = Math.max(...plain.values(), ...planned.values());
  const point = (name) => {
    for (const bar of document.querySelectorAll("#budget i"))
      bar.classList.toggle("dim", name !== null && bar.dataset.row !== name);
  };
  const rows = names.map((name) =>
    el(
      "tr",
      { onmouseenter: () => point(name), onmouseleave: () => point(null) },
      el("td", {}, swatch(name), name),
      el("td", { class: "n" }, size(plain.get(name) ?? 0)),
      el("td", { class: "n" }, size(planned.get(name) ?? 0)),
      el("td", { class: "wide" }, lengths(name, plain.get(name) ?? 0, planned.get(name) ?? 0, most)),
    ),
  );
  const sum = el(
    "tr",
    { class: "sum" },
    el("td", {}, "peak"),
    el("td", { class: "n" }, size(plan.plain.peak)),
    el("td", { class: "n" }, size(plan.planned.peak)),
    el("td"),
  );
  const bytes = el(
    "div",
    {},
    el("h3", {}, "Every byte at the peak"),
    el("table", {}, head(["row", "nothing recomputed", "planned", ""]), el("tbody", {}, ...rows, sum)),
  );
  byId("receipt").replaceChildren(plan.receipt.length ? el("div", { class: "two" }, bytes, levers()) : bytes);
}

/** Two lengths in one bar: the planned bytes filled, those with nothing recomputed behind them. */
function lengths(name, plain, planned, most) {
  const bar = (bytes, part) =>
    el("i", {
      class: part,
      style: `width:${(100 * Math.max(0, bytes)) / most}%;background:${colourOf(name)}`,
    });
  return el("span", { class: "lengths" }, bar(plain, "behind"), bar(planned, "front"));
}

function head(titles, left = 1) {
  return el(
    "thead",
    {},
    el("tr", {}, ...titles.map((title, at) => el("th", { class: at >= left ? "n" : null }, title))),
  );
}

function levers() {
  const rows = plan.receipt.map(([lever, peak, seconds], at) => {
    const before = plan.receipt[at - 1];
    return el(
      "tr",
      {},
      el("td", {}, lever),
      el("td", { class: "n" }, size(peak)),
      el("td", { class: "n" }, before ? size(before[1] - peak) : ""),
      el("td", { class: "n" }, duration(seconds * 1e6)),
      el(
        "td",
        { class: "n" },
        before
          ? `${seconds >= before[2] ? "+" : "−"}${share(Math.abs(seconds - before[2]) / (plan.seconds || 1))}`
          : "",
      ),
    );
  });
  return el(
    "div",
    {},
    el("h3", {}, "What each lever brought"),
    el("table", {}, head(["lever", "peak", "less", "time", "added"]), el("tbody", {}, ...rows)),
  );
}

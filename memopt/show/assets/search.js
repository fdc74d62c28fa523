// The search box: it lists what matches, and filters the tables of changes and operators.
const LISTED = 8;

function hits(query) {
  const found = matching(query);
  const words = query.toLowerCase();
  const modules = step
    ? [...new Set(step.ops.module)]
        .map((number) => texts[number])
        .filter((path) => path.toLowerCase().includes(words))
    : [];
  const rows = data.diff.flatMap((section) => section.rows).filter((row) => rowMatches(row, words));
  return [
    [
      `Operators, ${found.length.toLocaleString("en")}`,
      found.map((op) => [ops.name[op], moduleOf(op) || "(model)", text("fate", op), () => change({ op })]),
    ],
    [
      `Modules, ${modules.length.toLocaleString("en")}`,
      modules.map((path) => [
        path,
        "",
        "",
        () => {
          change({ module: path });
          byId("modules").scrollIntoView();
        },
      ]),
    ],
    [
      `Changes, ${rows.length.toLocaleString("en")}`,
      rows.map((row) => [
        row.names.slice(0, 60),
        row.module,
        row.label,
        () => byId("changes").scrollIntoView(),
      ]),
    ],
  ].filter(([, list]) => list.length);
}

function drawHits() {
  const place = byId("hits");
  const query = state.query;
  place.hidden = !query || document.activeElement !== byId("search");
  if (place.hidden) return;
  const groups = hits(query);
  place.replaceChildren(
    ...groups.flatMap(([title, list]) => [
      el("h3", {}, title),
      ...list.slice(0, LISTED).map(([name, where, end, choose]) =>
        el(
          "button",
          {
            type: "button",
            onclick: () => {
              place.hidden = true;
              choose();
            },
          },
          el("span", { class: "mono" }, name),
          el("span", { class: "soft grow" }, where),
          el("span", { class: "end" }, end),
        ),
      ),
    ]),
    groups.length ? "" : el("p", {}, `Nothing matches “${query}”.`),
  );
}

function startSearch() {
  const box = byId("search");
  box.addEventListener("input", () => change({ query: box.value.trim() }));
  box.addEventListener("focus", drawHits);
  box.addEventListener("keydown", (event) => {
    const listed = [...byId("hits").querySelectorAll("button")];
    if (event.key === "Enter" && listed.length)
      (listed.find((one) => one.classList.contains("on")) ?? listed[0]).click();
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const now = listed.findIndex((one) => one.classList.contains("on"));
      const next = Math.max(0, Math.min(listed.length - 1, now + (event.key === "ArrowDown" ? 1 : -1)));
      listed.forEach((one, at) => one.classList.toggle("on", at === next));
      listed[next]?.scrollIntoView({ block: "nearest" });
      event.preventDefault();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== box) {
      box.focus();
      event.preventDefault();
    } else if (event.key === "Escape") {
      byId("hits").hidden = true;
      change({ op: null });
    }
  });
  document.addEventListener("pointerdown", (event) => {
    if (!event.target.closest(".search")) byId("hits").hidden = true;
  });
}

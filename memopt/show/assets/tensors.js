// The live tensors of a moment: a few beside the pointer, all of them below the picture.
const FEW = 9;
const SOME = 12;
let allTensors = false;

function showMoment(x, y) {
  const moment = state.moment;
  if (moment === null) return hideTip();
  const held = memory();
  const live = liveAt(held, moment);
  const rows = live
    .slice(0, FEW)
    .map((one) =>
      el(
        "tr",
        {},
        el(
          "td",
          { class: "name" },
          swatch(one.kind),
          ops.name[one.op],
          el("span", { class: "soft" }, ` ${moduleOf(one.op) || "(model)"}`),
        ),
        el("td", { class: "n" }, size(one.bytes)),
      ),
    );
  const rest = live.slice(FEW);
  if (rest.length)
    rows.push(
      el(
        "tr",
        {},
        el("td", { class: "soft" }, `and ${many(rest.length, "more tensor")}`),
        el("td", { class: "n soft" }, size(total(rest))),
      ),
    );
  const whole = rowsAt(held, moment).reduce((sum, [, bytes]) => sum + bytes, 0);
  rows.push(
    el(
      "tr",
      {},
      el("td", { class: "soft" }, "parameters, optimizer state and other rows"),
      el("td", { class: "n soft" }, size(whole)),
    ),
  );
  showTip(
    x,
    y,
    el("b", {}, size(held.total[moment])),
    ` at ${nameOf(moment)} `,
    el("span", { class: "soft" }, whereIs(held, moment)),
    el("table", {}, el("tbody", {}, ...rows)),
  );
}

function total(live) {
  return live.reduce((sum, one) => sum + one.bytes, 0);
}

/** The module and the half of the step of a moment. */
function whereIs(held, moment) {
  if (moment === held.count) return "after the backward";
  const half =
    moment < held.boundary ? "forward" : held.again[moment] ? "recomputed in the backward" : "backward";
  return `${moduleOf(held.op[moment]) || "(model)"}, ${half}`;
}

function showTip(x, y, ...parts) {
  const tip = byId("tip");
  tip.replaceChildren(...parts);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const right = x + 18 + width < window.innerWidth ? x + 18 : Math.max(6, x - width - 18);
  tip.style.left = `${right}px`;
  tip.style.top = `${Math.max(6, Math.min(window.innerHeight - height - 6, y - height / 2))}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}

/** The table below the picture: every live tensor of the moment that was kept, or of the peak. */
function drawTensors() {
  const held = memory();
  const moment = Math.min(state.pinned ?? held.peak, held.count);
  const live = liveAt(held, moment);
  const most = Math.max(1, ...live.map((one) => one.bytes));
  const listed = allTensors ? live : live.slice(0, SOME);
  const rows = listed.map((one) =>
    el(
      "tr",
      { class: "can", onclick: () => change({ op: one.op }) },
      el("td", {}, el("span", { class: "mono" }, ops.name[one.op])),
      el("td", {}, moduleOf(one.op) || "(model)"),
      el("td", {}, swatch(one.kind), one.kind),
      el(
        "td",
        { class: "mono soft", title: text("value", one.op) },
        one.kind === "workspace" ? "" : shorten(text("value", one.op)),
      ),
      el(
        "td",
        { class: "n" },
        size(one.bytes),
        el(
          "span",
          { class: "meter" },
          el("i", { style: `width:${(100 * one.bytes) / most}%;background:${colourOf(one.kind)}` }),
        ),
      ),
    ),
  );
  const which = state.pinned === null ? "At the peak" : "Kept";
  const title = el(
    "h3",
    {},
    `${which}: ${size(held.total[moment])} at ${nameOf(moment)} `,
    el(
      "span",
      { class: "soft" },
      `${whereIs(held, moment)}; ${many(live.length, "live tensor")}, ${size(total(live))}`,
    ),
  );
  const more =
    live.length > SOME
      ? el(
          "button",
          {
            class: "more",
            type: "button",
            onclick: () => {
              allTensors = !allTensors;
              drawTensors();
            },
          },
          allTensors ? "Show fewer" : `Show all ${live.length}`,
        )
      : "";
  byId("tensors").replaceChildren(
    title,
    live.length
      ? el("table", {}, head(["tensor", "module", "row", "value", "bytes"], 4), el("tbody", {}, ...rows))
      : "",
    more,
  );
}

function shorten(value) {
  return value.length > 36 ? `${value.slice(0, 35)}…` : value;
}

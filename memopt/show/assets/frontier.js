// Peak against added time: the plan, its bound, checkpointing by hand, and the whole curve where it was asked for.
const FRONTIER_HEIGHT = 340;

function drawFrontier() {
  const { points, recipes, smallest } = data.frontier;
  const own = [
    ["this plan", plan.planned.peak, plan.added],
    ["nothing recomputed", plan.plain.peak, 0],
  ];
  const byHand = recipes.filter(([, , added]) => added > 0);
  const peaks = [
    ...points.map((point) => point[1]),
    ...byHand.map((one) => one[1]),
    ...own.map((one) => one[1]),
  ];
  const times = [...points.map((point) => point[2]), ...byHand.map((one) => one[2]), plan.added, plan.bound];
  const [least, most] = [Math.min(...peaks), Math.max(...peaks)];
  const highest = Math.max(...times, 0.01) * 1.12;
  const place = byId("frontier");
  const width = Math.max(320, place.clientWidth);
  const isNarrow = width < 560; // the names stand below the picture then
  const inner = width - MARGIN.left - (isNarrow ? 30 : 150);
  const floor = FRONTIER_HEIGHT - 46;
  const pad = (most - least) * 0.04 || most * 0.05;
  const x = (bytes) => MARGIN.left + ((bytes - least + pad) / (most - least + 2 * pad)) * inner;
  const y = (added) => floor - (added / highest) * (floor - 14);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${FRONTIER_HEIGHT}`, height: FRONTIER_HEIGHT });
  for (const at of ticks(0, highest, 5)) {
    picture.append(
      svg("line", { class: "grid", x1: MARGIN.left, x2: MARGIN.left + inner, y1: y(at), y2: y(at) }),
      svg(
        "text",
        { x: MARGIN.left - 10, y: y(at) + 4, "text-anchor": "end" },
        at ? `+${Number((100 * at).toPrecision(3))}%` : "0",
      ),
    );
  }
  for (const at of byteTicks(most + pad, Math.min(6, inner / 55), least - pad))
    picture.append(svg("text", { x: x(at), y: floor + 20, "text-anchor": "middle" }, size(at)));
  picture.append(
    svg(
      "text",
      { x: MARGIN.left + inner / 2, y: FRONTIER_HEIGHT - 4, "text-anchor": "middle" },
      "peak of the step",
    ),
  );
  if (points.length) {
    // A bound for one budget holds for every smaller one, down to the budget before it.
    const under = points
      .map(
        ([budget, , , bound], at) =>
          `L${x(points[Math.max(0, at - 1)][0])} ${y(bound)}L${x(budget)} ${y(bound)}`,
      )
      .join("");
    picture.append(
      svg("path", {
        d: `M${x(points[0][0])} ${floor}${under}L${x(points.at(-1)[0])} ${floor}Z`,
        fill: "var(--shade)",
      }),
    );
    picture.append(
      svg("path", {
        d: `M${points.map(([, peak, added]) => `${x(peak)} ${y(added)}`).join("L")}`,
        fill: "none",
        stroke: "var(--accent)",
        "stroke-width": 2,
      }),
    );
  }
  const dots = [
    ...points.map(([budget, peak, added, bound, method]) => [
      `${size(budget)}: +${share(added)}, at least +${share(bound)} (${method})`,
      peak,
      added,
      "var(--accent)",
      3,
    ]),
    ...byHand.map(([name, peak, added]) => [
      `by hand, ${name}: ${size(peak)}, +${share(added)}`,
      peak,
      added,
      "var(--warn)",
      4.5,
    ]),
  ];
  for (const [label, peak, added, colour, radius] of dots)
    picture.append(dot(label, x(peak), y(added), colour, radius));
  if (!isNarrow)
    nameRecipes(
      picture,
      byHand.map(([name, peak, added]) => [name, x(peak), y(added)]),
    );
  drawOwn(picture, own, x, y, isNarrow ? 0 : width);
  place.replaceChildren(picture, ...(isNarrow ? [named(own, "var(--ink)"), named(byHand, "var(--warn)")] : []));
  byId("frontier-lead").textContent =
    `Orange dots are recipes of checkpointing by hand on the same step. ` +
    (points.length
      ? `The line is the least time found for each budget, from the smallest that works, ${size(smallest)}; no schedule is in the grey area.`
      : "memopt report --frontier 20 adds the whole curve.");
}

function named(dots, colour) {
  const lines = dots.map(([name, peak, added]) => el("div", {}, `${name}: ${size(peak)}, +${share(added)}`));
  return el("div", { style: `color:${colour};font-size:13px` }, ...lines);
}

function dot(label, x, y, colour, radius) {
  const circle = svg("circle", { cx: x, cy: y, r: radius, fill: colour });
  circle.addEventListener("pointermove", (event) => showTip(event.clientX, event.clientY, label));
  circle.addEventListener("pointerleave", hideTip);
  return circle;
}

/** The names of the recipes on the right or the left of their dots, where there is room; pointing at a dot shows its
 * name too. */
function nameRecipes(picture, dots) {
  const taken = dots.map(([, x, y]) => [x - 5, y - 5, x + 5, y + 5]);
  for (const [name, x, y] of dots) {
    const width = 6.4 * name.length;
    const isFree = (box) =>
      !taken.some((other) => box[0] < other[2] && other[0] < box[2] && box[1] < other[3] && other[1] < box[3]);
    const box = [x + 8, x - 8 - width].map((left) => [left, y - 9, left + width, y + 5]).find(isFree);
    if (!box) continue;
    taken.push(box);
    picture.append(svg("text", { x: box[0], y: y + 4, class: "recipe" }, name));
  }
}

/** The plan, with the line down to its bound, and the step with nothing recomputed; named where `width` is not 0. */
function drawOwn(picture, own, x, y, width) {
  const [, peak, added] = own[0];
  picture.append(
    svg("line", {
      x1: x(peak),
      x2: x(peak),
      y1: y(plan.bound),
      y2: y(added),
      stroke: "var(--ink)",
      "stroke-width": 1.5,
    }),
  );
  picture.append(
    svg("line", {
      x1: x(peak) - 6,
      x2: x(peak) + 6,
      y1: y(plan.bound),
      y2: y(plan.bound),
      stroke: "var(--ink)",
      "stroke-width": 1.5,
    }),
  );
  own.forEach(([name, at, time], number) => {
    picture.append(dot(`${name}: ${size(at)}, +${share(time)}`, x(at), y(time), "var(--ink)", 5.5));
    if (!width) return;
    const label = number ? name : `this plan: +${share(time)}, at least +${share(plan.bound)}`;
    const long = 7.2 * label.length;
    const meets = !number && x(at) + long + 20 > x(own[1][1]); // the name of the other dot
    // A name stands right of its dot, above the curve, or ends at the right edge.
    const out = x(at) + 10 + long > width;
    const place = {
      x: out ? width : x(at) + 10,
      y: y(time) - (meets ? 28 : 8),
      "text-anchor": out ? "end" : "start",
    };
    picture.append(svg("text", { ...place, style: "fill:var(--ink);font-weight:600" }, label));
  });
}

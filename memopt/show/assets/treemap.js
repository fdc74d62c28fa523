// Bytes by module at one moment: modules within modules, and in each a rectangle for each row of the account.
const MAP_HEIGHT = 420;
const HEAD = 20;

/** The tree of modules with bytes: `own` by row, `size` of all below. */
function moduleTree(bytes) {
  const root = { name: "", path: "", children: new Map(), own: new Map(), size: 0 };
  for (const [path, rows] of bytes) {
    const parts = path ? path.split(".") : [];
    let node = root;
    const whole = [...rows.values()].reduce((sum, one) => sum + one, 0);
    node.size += whole;
    parts.forEach((part, depth) => {
      if (!node.children.has(part))
        node.children.set(part, {
          name: part,
          path: parts.slice(0, depth + 1).join("."),
          children: new Map(),
          own: new Map(),
          size: 0,
        });
      node = node.children.get(part);
      node.size += whole;
    });
    node.own = rows;
  }
  return root;
}

function nodeAt(root, path) {
  let node = root;
  for (const part of path ? path.split(".") : []) node = node.children.get(part) ?? node;
  return node;
}

/** A module, or the first module below it that has more than one thing inside. */
function throughOnly(node) {
  while (node.children.size === 1 && node.own.size === 0) [node] = node.children.values();
  return node;
}

function drawTreemap() {
  if (!step) return;
  const held = memory();
  const moment = Math.min(state.pinned ?? held.peak, held.count);
  const root = moduleTree(byModule(held, moment));
  const node = nodeAt(root, state.module);
  const place = byId("treemap");
  const width = Math.max(320, place.clientWidth);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${MAP_HEIGHT}`, height: MAP_HEIGHT });
  fillBox(picture, node, { x: 0, y: 0, width, height: MAP_HEIGHT }, 0);
  place.replaceChildren(picture);
  const when = state.pinned === null ? "the peak" : nameOf(moment);
  byId("modules-at").textContent =
    `${size(held.total[moment])} at ${when}, ${state.which === "planned" ? "as planned" : "with nothing recomputed"}: what each module holds; optimizer state is with its parameters.`;
  drawCrumbs(node);
}

function fillBox(picture, node, box, depth) {
  const parts = [
    ...[...node.children.values()].map((child) => ({ size: child.size, child: throughOnly(child) })),
    ...[...node.own].map(([kind, bytes]) => ({ size: bytes, kind })),
  ];
  for (const { item, box: room } of squarify(parts, box)) {
    if (room.width < 1 || room.height < 1) continue;
    if (item.kind) leaf(picture, node, item, room);
    else group(picture, item.child, room, depth);
  }
}

function leaf(picture, node, item, box) {
  const rect = svg("rect", { ...box, class: "leaf", fill: colourOf(item.kind) });
  rect.addEventListener("pointermove", (event) =>
    showTip(
      event.clientX,
      event.clientY,
      el("b", {}, size(item.size)),
      ` ${item.kind}`,
      el("div", { class: "soft" }, node.path || "(model)"),
    ),
  );
  rect.addEventListener("pointerleave", hideTip);
  if (node.path && node.path !== state.module)
    rect.addEventListener("click", () => change({ module: node.path }));
  picture.append(rect);
  const label = [`${item.kind} ${size(item.size)}`, item.kind, size(item.size)].find(
    (text) => box.width > 7 * text.length + 10,
  );
  if (label && box.height > 26) picture.append(svg("text", { x: box.x + 7, y: box.y + 17 }, label));
}

function group(picture, node, box, depth) {
  const named = box.width > 60 && box.height > 34;
  const inside =
    named && depth < 3
      ? {
          x: box.x + 2,
          y: box.y + HEAD,
          width: Math.max(0, box.width - 4),
          height: Math.max(0, box.height - HEAD - 2),
        }
      : box;
  if (inside !== box) {
    picture.append(svg("rect", { ...box, class: "head" }));
    const label = state.module ? node.path.slice(state.module.length + 1) : node.path;
    const text = depth ? node.path.split(".").slice(-2).join(".") : label;
    const room = Math.floor((box.width - 10) / 6.6);
    const bytes = ` ${size(node.size)}`;
    const name = text.length > room ? `${text.slice(0, Math.max(1, room - 1))}…` : text;
    picture.append(
      svg(
        "text",
        { x: box.x + 6, y: box.y + 14 },
        name + (name === text && text.length + bytes.length <= room ? bytes : ""),
      ),
    );
  }
  fillBox(picture, node, inside, depth + 1);
  if (inside === box) return;
  const frame = svg("rect", { x: box.x, y: box.y, width: box.width, height: HEAD, class: "group" });
  frame.addEventListener("click", () => change({ module: node.path }));
  frame.addEventListener("pointermove", (event) =>
    showTip(event.clientX, event.clientY, el("b", {}, size(node.size)), ` ${node.path}`),
  );
  frame.addEventListener("pointerleave", hideTip);
  picture.append(frame);
}

function drawCrumbs(node) {
  const parts = node.path ? node.path.split(".") : [];
  const steps = parts.map((part, depth) => [part, parts.slice(0, depth + 1).join(".")]);
  byId("crumbs").replaceChildren(
    ...[["model", ""], ...steps]
      .flatMap(([name, path], at) => [
        at ? el("span", { class: "soft" }, " › ") : "",
        path === node.path
          ? el("span", {}, name)
          : el("button", { type: "button", onclick: () => change({ module: path }) }, name),
      ])
      .filter(Boolean),
    el("span", { class: "soft" }, `  ${size(node.size)}`),
  );
}

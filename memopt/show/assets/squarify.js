// A squarified treemap: rectangles of given areas in a box, each as near to a square as a row of them allows.
// Source: Bruls, Huizing, van Wijk, "Squarified treemaps", 2000.

/** `items` have a `size`, and come back with the box that each gets, the largest first. */
function squarify(items, box) {
  const placed = [];
  const left = items.filter((item) => item.size > 0).sort((a, b) => b.size - a.size);
  const sum = left.reduce((all, item) => all + item.size, 0);
  const scale = sum ? (box.width * box.height) / sum : 0;
  let { x, y, width, height } = box;
  while (left.length) {
    const side = Math.min(width, height);
    const row = [left.shift()];
    while (left.length && worst([...row, left[0]], side, scale) <= worst(row, side, scale))
      row.push(left.shift());
    const thick = side ? (row.reduce((all, item) => all + item.size, 0) * scale) / side : 0;
    let along = 0;
    for (const item of row) {
      const long = thick ? (item.size * scale) / thick : 0;
      placed.push({
        item,
        box:
          width >= height
            ? { x, y: y + along, width: thick, height: long }
            : { x: x + along, y, width: long, height: thick },
      });
      along += long;
    }
    if (width >= height) [x, width] = [x + thick, width - thick];
    else [y, height] = [y + thick, height - thick];
  }
  return placed;
}

/** The worst ratio of sides in a row of items along a side. */
function worst(row, side, scale) {
  const areas = row.map((item) => item.size * scale);
  const sum = areas.reduce((all, area) => all + area, 0);
  return Math.max(
    (side * side * Math.max(...areas)) / (sum * sum),
    (sum * sum) / (side * side * Math.min(...areas)),
  );
}

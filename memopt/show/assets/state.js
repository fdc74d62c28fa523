// What the reader has chosen. A part of the page is drawn again when a choice that it named in `drawn` changes.
const state = {
  which: "planned", // or "plain"
  scale: "time", // or "order"
  zoom: null, // [from, to] on the axis of the timeline
  moment: null, // under the pointer
  pinned: null, // kept by a click
  op: null, // number of the operator whose story is told
  query: "",
  kinds: new Set(), // kinds of changes that are shown; all if empty
  module: "", // the module that the treemap shows
};
const drawings = [];

function drawn(names, draw) {
  drawings.push([names, draw]);
}

function change(values) {
  const changed = Object.keys(values).filter((name) => state[name] !== values[name]);
  Object.assign(state, values);
  for (const [names, draw] of drawings) if (names.some((name) => changed.includes(name))) draw();
}

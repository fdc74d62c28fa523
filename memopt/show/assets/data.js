// The figures of the page. Each text is stored once, in `texts`; the figures have its number there.
const data = JSON.parse(byId("data").textContent);
const plan = data.plan;
const texts = data.texts;
const step = data.step;
const ops = step && step.ops;

function text(column, number) {
  return texts[ops[column][number]];
}

function moduleOf(op) {
  return text("module", op);
}

/** The rows of the account from the bottom of the timeline to its top, and their colours. */
const KINDS = [
  ["parameters", "parameters"],
  ["optimizer state", "state"],
  ["other", "rest"],
  ["gradients", "gradients"],
  ["outputs", "outputs"],
  ["saved activations", "saved"],
  ["fetched activations", "fetched"],
  ["recomputed activations", "recomputed"],
  ["backward temporaries", "temporaries"],
  ["optimizer temporaries", "temporaries"],
  ["workspace", "workspace"],
];
const KIND_NUMBER = new Map(KINDS.map(([name], number) => [name, number]));
const OTHER = KIND_NUMBER.get("other");
const WORKSPACE = KIND_NUMBER.get("workspace");

function kindNumber(name) {
  return KIND_NUMBER.get(name) ?? OTHER;
}

function colourOf(name) {
  return `var(--k-${KINDS[kindNumber(name)][1]})`;
}

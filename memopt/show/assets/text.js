// Text for figures, and elements of the page. Data only ever becomes text nodes and attributes, never markup.
const GIB = 1024 ** 3;

function size(bytes) {
  if (bytes < 0) return `−${size(-bytes)}`;
  for (const [unit, scale] of [
    ["GB", GIB],
    ["MB", 1024 ** 2],
    ["kB", 1024],
  ]) {
    if (bytes >= scale) return `${threeDigits(bytes / scale)} ${unit}`;
  }
  return bytes ? `${bytes} B` : "–";
}

function duration(micros) {
  if (micros >= 1e6) return `${threeDigits(micros / 1e6)} s`;
  if (micros >= 1e3) return `${threeDigits(micros / 1e3)} ms`;
  return micros ? `${threeDigits(micros)} µs` : "–";
}

function threeDigits(value) {
  return value < 999.5 ? String(Number(value.toPrecision(3))) : Math.round(value).toLocaleString("en");
}

function share(fraction) {
  return `${(100 * fraction).toFixed(1)}%`;
}

function many(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

function byId(id) {
  return document.getElementById(id);
}

/** An element with attributes and children; "on…" attributes are listeners, texts become text nodes. */
function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false)
      element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

function swatch(kind) {
  return el("i", { class: "swatch", style: `background:${colourOf(kind)}` });
}

/** Two or more buttons of which one is pressed. `choose` gets the value of the button that was clicked. */
function choice(place, options, chosen, choose) {
  place.replaceChildren(
    ...options.map(([value, label]) =>
      el(
        "button",
        { type: "button", "aria-pressed": String(value === chosen), onclick: () => choose(value) },
        label,
      ),
    ),
  );
}

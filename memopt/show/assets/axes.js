// Round numbers for axes.
function ticks(from, to, wanted, base = 10) {
  const raw = (to - from) / wanted;
  if (!(raw > 0)) return [from];
  const power = base ** Math.floor(Math.log(raw) / Math.log(base));
  const steps = base === 2 ? [1, 2] : [1, 2, 5, 10];
  const width = steps.map((times) => times * power).find((step) => step >= raw * 0.999) ?? base * power;
  const found = [];
  for (let at = Math.ceil(from / width - 1e-9); at * width <= to * (1 + 1e-9); at++) found.push(at * width);
  return found;
}

/** Ticks of bytes from `least` on: round in the unit in which they are written. */
function byteTicks(most, wanted, least = 0) {
  const unit = most >= GIB ? GIB : most >= 1024 ** 2 ? 1024 ** 2 : 1024;
  return ticks(least / unit, most / unit, wanted).map((value) => value * unit);
}

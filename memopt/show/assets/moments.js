// What is held at every moment of the step. Moment `count` is that of optimizer.step().
const OPTIMIZER = "optimizer.step()";
const memories = step ? { planned: memoryOf(step.planned), plain: memoryOf(step.plain) } : {};

function memoryOf(packed) {
  const count = packed.op.length;
  const bands = KINDS.map(() => new Float64Array(count + 1));
  const held = KINDS.map(() => 0);
  for (const [row, bytes] of packed.resident) held[kindNumber(texts[row])] += bytes;
  const { op, bytes, kind, first, last } = packed.ranges;
  for (let at = 0; at < op.length; at++) {
    const band = bands[kindNumber(texts[kind[at]])];
    band[first[at]] += bytes[at];
    band[last[at] + 1] -= bytes[at];
  }
  const total = new Float64Array(count + 1);
  for (let number = 0; number < bands.length; number++) {
    let now = held[number];
    for (let at = 0; at < count; at++) {
      now += bands[number][at];
      bands[number][at] = now;
    }
    bands[number][count] = 0;
  }
  for (const [at, extra] of packed.workspace) bands[WORKSPACE][at] += extra;
  for (const [row, extra] of packed.optimizer) bands[kindNumber(texts[row])][count] += extra;
  for (const band of bands) for (let at = 0; at <= count; at++) total[at] += band[at];
  const again = new Uint8Array(count);
  for (const at of packed.again) again[at] = 1;
  let peak = 0;
  for (let at = 1; at <= count; at++) if (total[at] > total[peak]) peak = at;
  return { ...packed, count, bands, total, again, peak, workspaceAt: new Map(packed.workspace) };
}

function memory() {
  return memories[state.which];
}

/** The moment that the page is about: the one under the pointer, the one that was kept, else the peak. */
function present() {
  return Math.min(state.moment ?? state.pinned ?? memory().peak, memory().count);
}

function nameOf(moment) {
  return moment === memory().count ? OPTIMIZER : ops.name[memory().op[moment]];
}

/** The live tensors at a moment, the largest first. */
function liveAt(held, moment) {
  const found = [];
  const { op, bytes, kind, first, last } = held.ranges;
  if (moment < held.count) {
    for (let at = 0; at < op.length && first[at] <= moment; at++) {
      if (last[at] >= moment && bytes[at])
        found.push({ op: op[at], bytes: bytes[at], kind: texts[kind[at]], range: at });
    }
    const workspace = held.workspaceAt.get(moment);
    if (workspace) found.push({ op: held.op[moment], bytes: workspace, kind: "workspace", range: -1 });
  }
  return found.sort((a, b) => b.bytes - a.bytes);
}

/** The rows of the account that are held as a whole at a moment. */
function rowsAt(held, moment) {
  return moment < held.count ? held.resident : held.optimizer;
}

/** Bytes by module and row at a moment: rows of parameters are divided among their modules. */
function byModule(held, moment) {
  const found = new Map();
  const add = (module, kind, bytes) => {
    if (bytes <= 0) return;
    if (!found.has(module)) found.set(module, new Map());
    found.get(module).set(kind, (found.get(module).get(kind) ?? 0) + bytes);
  };
  const known = step.parameters.reduce((sum, [, bytes]) => sum + bytes, 0);
  for (const [row, bytes] of rowsAt(held, moment)) {
    const name = texts[row];
    let left = bytes;
    if (known && ["parameters", "optimizer state", "gradients"].includes(name)) {
      const whole = name === "parameters" ? Math.max(bytes, known) : known;
      for (const [module, own] of step.parameters) {
        const part = Math.floor((bytes * own) / whole);
        left -= part;
        add(texts[module], name, part);
      }
    }
    add("", name, left);
  }
  for (const live of liveAt(held, moment)) add(moduleOf(live.op), live.kind, live.bytes);
  return found;
}

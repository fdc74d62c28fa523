// What another card would buy: whether the step fits there, its time, and how much larger a batch fits.
function drawCards() {
  const rows = data.cards.map(([name, memory, needed, seconds, added, batches]) =>
    el(
      "tr",
      { class: name === plan.hardware ? "own" : null },
      el("td", {}, name),
      el("td", { class: "n" }, size(memory)),
      el("td", { class: "n" }, size(needed)),
      el("td", { class: "n" }, seconds === null ? "does not fit" : duration(seconds * 1e6)),
      el("td", { class: "n" }, seconds === null ? "–" : `+${share(added)}`),
      el("td", { class: "n" }, batches === null ? "–" : `${batches < 10 ? batches.toFixed(1) : Math.round(batches)} ×`),
    ),
  );
  byId("cards-lead").textContent =
    "The same step within all the memory of each card, by the time model. The largest batch is about that many times this one, with as much recomputed as it needs.";
  byId("cards-table").replaceChildren(
    el(
      "table",
      {},
      head(["card", "memory", "smallest budget", "forward and backward", "added", "largest batch"]),
      el("tbody", {}, ...rows),
    ),
  );
}

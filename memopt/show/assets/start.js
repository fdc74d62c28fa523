// Draws the page; parts for which the plan has no figures are taken out.
function start() {
  startTheme();
  const has = {
    step: step !== null,
    frontier: data.frontier.points.length + data.frontier.recipes.length > 0 || step !== null,
    cards: data.cards.length > 0,
    types: step !== null && step.types.name.length > 0,
  };
  for (const part of document.querySelectorAll("[data-needs]")) if (!has[part.dataset.needs]) part.remove();
  drawSummary();
  byId("contents").replaceChildren(
    ...[...document.querySelectorAll("main > section > h2")].map((title) =>
      el("a", { href: `#${title.parentElement.id}` }, title.textContent),
    ),
  );
  if (step) {
    drawn(["which", "scale"], drawControls);
    drawn(["which", "scale", "zoom"], drawTimeline);
    drawn(["op", "which"], drawRanges);
    drawn(["moment", "pinned"], drawMarks);
    drawn(["which", "pinned"], drawTensors);
    drawn(["which", "pinned", "module"], drawTreemap);
    drawn(["query", "kinds"], drawDiff);
    drawn(["query"], drawOperators);
    drawn(["query"], drawHits);
    drawn(["op"], drawStory);
    for (const draw of [drawControls, drawTimeline, drawTensors, drawTreemap, drawDiff, drawOperators])
      draw();
    startTimeline();
    startSearch();
    new ResizeObserver(drawTreemap).observe(byId("treemap"));
  } else byId("search").closest(".search").remove();
  if (has.cards) drawCards();
  if (has.types) drawTypes();
  if (has.frontier) {
    drawFrontier();
    new ResizeObserver(drawFrontier).observe(byId("frontier"));
  }
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

start();

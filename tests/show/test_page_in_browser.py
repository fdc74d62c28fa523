"""The page in a real Chromium: what readers do with it, in both themes, without an error and without the network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from examples.models.browser import chromium, open_page, why_no_browser
from memopt.planning.plan import Plan
from memopt.show.step import step_of
from memopt.units import size
from tests.planning.test_plan_networkx import gpt2

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A GPT-2 of two blocks within the smallest budget."""
    return gpt2()


@pytest.fixture(scope="module")
def file(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "gpt2.html"
    plan.report(path, frontier=plan.frontier(5, effort="fast"))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as driver:
        yield driver


@pytest.fixture
def page(browser: Any, file: Path) -> Iterator[Any]:
    """The page, newly opened; at the end nothing may stand in the console, nor may anything have been asked of the
    network."""
    open_page(browser, file)
    yield browser
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]
    assert not {url.partition(":")[0] for url in asked} & {"http", "https", "ws", "wss"}


def text(page: Any, selector: str) -> str:
    return str(page.execute_script("return document.querySelector(arguments[0]).innerText", selector))


def point_at(page: Any, share: float) -> None:
    """Move the mouse over the timeline, at a share of its width."""
    from selenium.webdriver.common.action_chains import ActionChains

    chart = page.find_element("id", "chart")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    ActionChains(page).move_to_element_with_offset(chart, int((share - 0.5) * chart.size["width"]), 0).perform()


@pytest.fixture
def phone(page: Any) -> Iterator[Any]:
    """The page on a narrow screen."""
    screen = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    page.refresh()
    yield page
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_names_of_the_recipes_are_whole_on_a_phone(phone: Any, plan: Plan) -> None:
    """They stand below the picture, as there is no room for all of them in it."""
    assert phone.execute_script("return document.querySelectorAll('#frontier text.recipe').length") == 0
    below = text(phone, "#frontier")
    assert "nothing recomputed: " in below
    assert all(f"{recipe.name}: " in below for recipe in plan.recipes() if recipe.added_time > 0)


def test_the_planned_bytes_are_seen_on_a_phone(phone: Any) -> None:
    ends = "return [...document.querySelectorAll('.two td.n')].map((cell) => cell.getBoundingClientRect().right)"
    assert max(phone.execute_script(ends)) <= 390


def test_the_hint_of_the_search_is_whole_on_a_phone(phone: Any) -> None:
    room, hint = phone.execute_script(
        "const box = document.getElementById('search'), style = getComputedStyle(box);"
        "const pen = document.createElement('canvas').getContext('2d'); pen.font = style.font;"
        "const padding = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);"
        "return [box.clientWidth - padding, pen.measureText(box.placeholder).width]"
    )
    assert hint <= room


def test_the_figures_are_the_plan_s(page: Any, plan: Plan) -> None:
    figures = text(page, "#figures")
    assert size(plan.predicted_peak_bytes) in figures
    assert size(plan.plain.peak_bytes) in figures
    assert f"+{plan.added_time + plan.host_share:.1%}" in figures
    rows = text(page, "#receipt")
    for name, nbytes in plan.planned.rows:
        assert name in rows
        assert size(nbytes) in rows
    assert page.execute_script("return document.querySelectorAll('#frontier circle').length") > 5


def test_other_cards_are_a_table(browser: Any, tmp_path: Path) -> None:
    batch, file = (torch.ones(8, 64), torch.ones(8, 64)), tmp_path / "cards.html"
    plan = memopt.plan(nn.Linear(64, 64), 1, batch, loss_fn=nn.functional.mse_loss, device="rtx-4090")
    plan.report(file, cards=plan.cards())
    open_page(browser, file)
    rows = text(browser, "#cards-table")
    for card in plan.cards():
        assert f"{card.name}\t{size(card.memory_bytes)}\t{size(card.needed_bytes)}" in rows
    assert text(browser, "#cards-table tr.own").startswith("rtx-4090")
    assert browser.get_log("browser") == []


def test_the_contents_lead_to_every_section(page: Any) -> None:
    links = page.execute_script(
        "return [...document.querySelectorAll('#contents a')].map((a) => [a.textContent, a.getAttribute('href')])"
    )
    sections = page.execute_script(
        "return [...document.querySelectorAll('main > section > h2')]"
        ".map((title) => [title.textContent, '#' + title.parentElement.id])"
    )
    assert links == sections
    assert ["Memory against time", "#memory-and-time"] in links


def test_the_curve_of_memory_and_time(page: Any, plan: Plan) -> None:
    """The axis has several figures, recipes are named, and the plan's dot is on the curve or above it."""
    texts = page.execute_script("return [...document.querySelectorAll('#frontier text')].map((t) => t.textContent)")
    assert sum(bool(re.fullmatch(r"[\d.,]+ [kMG]B", one)) for one in texts) >= 3, texts
    names = page.execute_script("return [...document.querySelectorAll('#frontier .recipe')].map((t) => t.textContent)")
    assert names
    assert set(names) <= {recipe.name for recipe in plan.recipes()}
    figures = json.loads(page.execute_script("return document.getElementById('data').textContent"))
    points = figures["frontier"]["points"]
    assert [plan.budget_bytes, plan.predicted_peak_bytes, plan.added_time] in [point[:3] for point in points]
    added = [point[2] for point in points]
    assert added == sorted(added, reverse=True)
    assert all(one >= plan.added_time - 1e-12 for budget, _, one, *_ in points if budget <= plan.budget_bytes)


def test_pointing_at_the_timeline_names_the_live_tensors(page: Any, plan: Plan) -> None:
    step = step_of(plan)
    point_at(page, 0.5)
    tip = text(page, "#tip")
    found = re.match(r"(\S+ \S+) at (\w+)", tip)
    assert found
    name = found.group(2)
    moments = [at for at, one in enumerate(step.planned.evaluations) if step.ops[one.op].name == name]
    moment = next(at for at in moments if size(step.planned.live_bytes[at]) == found.group(1))
    tensors = [(nbytes, op) for op, row, nbytes in step.planned.alive(moment) if row != "workspace"]
    nbytes, op = max(tensors, key=lambda one: one[0])
    assert f"{step.ops[op].name} {step.ops[op].module}" in tip
    assert size(nbytes) in tip


AXIS = "return [...document.querySelectorAll('#chart text')].map(one => one.textContent).join(' ')"


def test_a_click_keeps_the_moment_and_a_drag_zooms(page: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    assert text(page, "#tensors").startswith("At the peak")
    point_at(page, 0.4)
    ActionChains(page).click().perform()
    kept = text(page, "#tensors")
    assert kept.startswith("Kept")
    axis = page.execute_script(AXIS)
    assert page.find_element("id", "reset").get_attribute("disabled")
    ActionChains(page).click_and_hold().move_by_offset(150, 0).release().perform()
    assert page.execute_script(AXIS) != axis
    assert text(page, "#tensors") == kept
    page.find_element("id", "reset").click()
    assert page.execute_script(AXIS) == axis


def test_search_finds_an_op_and_tells_its_story(page: Any) -> None:
    page.find_element("id", "search").send_keys("softmax h.1")
    hits = text(page, "#hits")
    assert "_safe_softmax_1" in hits
    assert "transformer.h.1.attn" in hits
    assert "match" in text(page, "#operators-lead")
    assert all("softmax" in row for row in text(page, "#table tbody").splitlines())
    page.execute_script("document.querySelector('#hits button').click()")
    story = text(page, "#story")
    assert story.startswith("_safe_softmax_1")
    for fact in ("transformer.h.1.attn", "recomputed", "f32[4, 2, 64, 64]", "sdpa_attention.py"):
        assert fact in story
    assert page.execute_script("return document.querySelectorAll('#ranges rect').length") > 1


def test_the_changes_unfold(page: Any, plan: Plan) -> None:
    recomputed = {change.op for change in plan.diff().changes if change.kind == "recomputed"}
    assert page.execute_script("return document.querySelectorAll('#diff .inner').length") == 0
    rows = "return [...document.querySelectorAll('#diff .row')].filter(row => row.querySelector('.kind-recomputed'))"
    for number in range(len(page.execute_script(rows))):
        page.execute_script(rows)[number].click()
    ops = "return [...document.querySelectorAll('#diff .inner tbody tr')].map(row => row.cells[0].innerText)"
    assert set(page.execute_script(ops)) == recomputed
    kinds = "return [...new Set([...document.querySelectorAll('#diff .kind')].map(one => one.innerText))]"
    assert len(page.execute_script(kinds)) > 1
    page.execute_script(
        "[...document.querySelectorAll('#kinds button')].find(one => one.innerText.includes('recomputed')).click()"
    )
    assert page.execute_script(kinds) == ["recomputed"]


def test_the_treemap_is_of_the_peak_and_goes_into_modules(page: Any, plan: Plan) -> None:
    assert size(plan.predicted_peak_bytes) in text(page, "#modules-at")
    areas = "return [...document.querySelectorAll('#treemap .leaf')].length"
    whole = page.execute_script(areas)
    page.execute_script(
        "const heads = [...document.querySelectorAll('#treemap .group')];"
        "heads[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    )
    assert "transformer" in text(page, "#crumbs")
    assert 0 < page.execute_script(areas) <= whole


CONTRASTS = """
const luminance = colour => {
  const context = new OffscreenCanvas(1, 1).getContext('2d');
  context.fillStyle = colour;
  context.fillRect(0, 0, 1, 1);
  const parts = [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map(part => part / 255);
  const [r, g, b] = parts.map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const paper = luminance(getComputedStyle(document.body).backgroundColor);
const found = {};
const texts = 'h1, h2, .lead, td, th, .kind, .figures span, #chart text, .note, button';
for (const one of document.querySelectorAll(texts)) {
  if (one.disabled || !one.textContent.trim()) continue;
  const style = getComputedStyle(one);
  const ink = luminance(one instanceof SVGElement ? style.fill : style.color);
  const contrast = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  const name = `${one.tagName} ${one.className.baseVal ?? one.className}`;
  found[name] = Math.min(found[name] ?? 99, contrast);
}
return [paper, found];
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_are_legible(browser: Any, file: Path, scheme: str, tmp_path: Path) -> None:
    """All texts have the contrast of 4.5 that WCAG AA asks for, and the picture shows the colours of the theme."""
    from PIL import Image

    open_page(browser, file, scheme)
    paper, contrasts = browser.execute_script(CONTRASTS)
    assert (paper > 0.5) == (scheme == "light")
    assert {name: contrast for name, contrast in contrasts.items() if contrast < 4.5} == {}
    browser.execute_script("document.getElementById('timeline').scrollIntoView()")
    browser.save_screenshot(str(tmp_path / "page.png"))
    image = Image.open(tmp_path / "page.png").convert("RGB")
    colours = {colour: times for times, colour in image.getcolors(image.width * image.height)}
    assert max(colours, key=colours.__getitem__) == ((255, 255, 255) if scheme == "light" else (0x14, 0x17, 0x1B))
    saved = (0x3F, 0x7F, 0xBF) if scheme == "light" else (0x4F, 0x93, 0xD6)
    assert colours.get(saved, 0) > 1000, "the saved activations are drawn in the theme's colour"


def test_the_switch_overrules_the_system(page: Any) -> None:
    def background() -> str:
        return str(page.execute_script("return getComputedStyle(document.body).backgroundColor"))

    seen = []
    for _ in range(3):
        page.find_element("id", "theme").click()
        seen.append((text(page, "#theme"), background()))
    light, dark = "rgb(255, 255, 255)", "rgb(20, 23, 27)"
    assert seen == [("Theme: light", light), ("Theme: dark", dark), ("Theme: system", light)]


@pytest.mark.slow
def test_a_plan_from_a_file_has_its_budget(browser: Any, plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    Plan.load(tmp_path / "plan.json").report(tmp_path / "loaded.html")
    open_page(browser, tmp_path / "loaded.html")
    assert size(plan.predicted_peak_bytes) in text(browser, "#figures")
    assert browser.execute_script("return document.querySelector('#timeline')") is None
    assert browser.get_log("browser") == []

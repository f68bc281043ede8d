"""The report in a real browser: Debian's chromium, headless, without a network.

apt-get install chromium        and playwright's driver comes with `pip install -e '.[dev]'`
"""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.analysis.runs import grid, write_study
from tests.report.test_report import hostile, spiky
from trimtab.analysis.findings import Findings, read
from trimtab.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DESKTOP, PHONE = {"width": 1200, "height": 900}, {"width": 360, "height": 740}
PATIENCE = 30_000  # ms: a browser on a busy machine is slow, not wrong

if CHROMIUM is None:
    pytest.skip("no browser: `apt-get install chromium` gets one", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="no browser driver: `pip install playwright` gets one")


@dataclass
class Visit:
    """A page, and what it did besides showing itself."""

    page: Any
    url: str
    requests: list[str] = field(default_factory=list)
    console: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def open(self) -> "Visit":
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.console.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))
        self.page.goto(self.url)
        self.page.wait_for_selector("html[data-drawn]", state="attached", timeout=PATIENCE)
        return self

    def wait(self, condition: str) -> None:
        """Until a condition holds. Asked from outside: the page's policy forbids a driver's own way, which is eval."""
        end = time.monotonic() + PATIENCE / 1000
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"never came true: {condition}"
            self.page.wait_for_timeout(50)

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # Root has no sandbox in a container; the page is our own.
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    study = grid(lrs=(0.003, 0.03, 0.3), seeds=(0,), steps=80)
    return read([write_study(tmp_path_factory.mktemp("study"), study, spiky)])


@pytest.fixture(scope="module")
def visit(browser: Any, findings: Findings) -> Iterator[Visit]:
    """One page for all that only look; each puts back what it changed."""
    folder = findings.studies[0].folder
    url = write_report(findings, folder, commands=["trimtab lab"]).as_uri()
    context = browser.new_context(viewport=DESKTOP, color_scheme="light", offline=True)
    yield Visit(context.new_page(), url).open()
    context.close()


def test_every_chart_is_drawn(visit: Visit) -> None:
    charts = visit.page.locator(".chart").all()
    assert len(charts) == 10
    for chart in charts:
        assert chart.locator("svg.main-svg").count() >= 1
        assert chart.locator(".scatterlayer .trace").count() >= 1
        assert chart.bounding_box()["height"] > 200


def test_only_the_page_is_requested_and_the_console_is_empty(visit: Visit) -> None:
    assert visit.requests == [visit.url]
    assert visit.console == []


def test_hovering_shows_the_run_its_learning_rate_and_its_loss(visit: Visit, findings: Findings) -> None:
    point = visit.page.locator("#learning-rates-1 .scatterlayer .points path").first
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    visit.page.mouse.move(box["x"] + box["width"] / 2 - 3, box["y"] + box["height"] / 2)
    visit.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    visit.wait("document.querySelector('#learning-rates-1 .hovertext')")
    said = visit.page.locator("#learning-rates-1 .hovertext").first.text_content()
    assert any(run.name in said for run in findings.results if run.arm == "steadied")
    assert re.search(r"learning rate 0\.(003|03|3)", said)
    assert re.search(r"validation loss \d\.\d{3}", said)
    visit.page.mouse.move(0, 0)


def test_a_button_of_the_legend_hides_a_line_and_shows_it_again(visit: Visit) -> None:
    button = visit.page.locator("#learning-rates .legend button").first
    before = visit.count("#learning-rates-0 .trace")
    button.click()
    visit.wait(f"document.querySelectorAll('#learning-rates-0 .trace').length < {before}")
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    visit.wait(f"document.querySelectorAll('#learning-rates-0 .trace').length === {before}")


def test_a_select_box_filters_the_runs_that_are_drawn(visit: Visit) -> None:
    lines = "#training-0 .scatterlayer .trace"
    largest = visit.count(lines)
    visit.page.select_option("#training select[name=size]", "")
    visit.wait(f"document.querySelectorAll('{lines}').length > {2 * largest}")
    visit.page.select_option("#training select[name=size]", "3x64")
    visit.wait(f"document.querySelectorAll('{lines}').length === {largest}")


def test_a_heading_sorts_the_table_both_ways(visit: Visit) -> None:
    head = visit.page.locator("#runs thead th", has_text="Learning rate")
    column = "[...document.querySelectorAll('#runs tbody tr')].map((row) => Number(row.cells[2].dataset.value))"
    for order, reverse in (("ascending", False), ("descending", True)):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == order
        values = visit.page.evaluate(column)
        assert values == sorted(values, reverse=reverse)
    assert len(values) == 18


def test_dark_mode_changes_the_colours_of_page_and_charts(visit: Visit) -> None:
    colours = """() => ["body", "#learning-rates-0 .scatterlayer path.js-line", "#learning-rates-0 .xtick text"].map(
        (selector) => Object.values((({backgroundColor, stroke, fill}) => ({backgroundColor, stroke, fill}))(
            getComputedStyle(document.querySelector(selector)))).join())"""
    light = visit.page.evaluate(colours)
    visit.page.emulate_media(color_scheme="dark")
    visit.wait(f"({colours})()[1] !== {light[1]!r}")
    dark = visit.page.evaluate(colours)
    assert all(a != b for a, b in zip(light, dark, strict=True))
    visit.page.emulate_media(color_scheme="light")
    visit.wait(f"({colours})()[1] === {light[1]!r}")


def test_text_and_lines_have_enough_contrast_in_both_colour_schemes(visit: Visit) -> None:
    for scheme in ("dark", "light"):
        visit.page.emulate_media(color_scheme=scheme)
        needed = dict.fromkeys(("--ink", "--muted", "--accent", "--fail", "--good"), 4.5)
        needed |= dict.fromkeys([f"--{name}-{i}" for name in ("size", "lr") for i in range(3)], 3.0)  # lines, not text
        needed |= dict.fromkeys([f"--arm-{i}" for i in range(7)], 3.0)
        colours = visit.page.evaluate(
            """(names) => Object.fromEntries(names.map(
                (name) => [name, getComputedStyle(document.documentElement).getPropertyValue(name).trim()]))""",
            [*needed, "--paper", "--card"],
        )
        for name, enough in needed.items():
            for ground in ("--paper", "--card"):
                assert contrast(colours[name], colours[ground]) >= enough, (scheme, name, ground)


def contrast(*colours: str) -> float:
    """As WCAG has it: 4.5 is enough for text."""
    shades = []
    for colour in colours:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        shades.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(shades) + 0.05) / (min(shades) + 0.05)


def test_a_phone_never_scrolls_sideways(visit: Visit) -> None:
    visit.page.set_viewport_size(PHONE)
    visit.wait("[...document.querySelectorAll('.main-svg')].every((svg) => svg.getBoundingClientRect().width <= 360)")
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    for chart in ("learning-rates-0", "logits-0"):
        labels = visit.page.locator(f"#{chart} .xtick text").all()
        boxes = [box for label in labels if (box := label.bounding_box()) and label.text_content()]
        assert len(boxes) >= 3
        assert all(a["x"] + a["width"] < b["x"] for a, b in pairwise(boxes))
    visit.page.set_viewport_size(DESKTOP)
    visit.wait("document.querySelector('#sensitivity-0 .main-svg').getBoundingClientRect().width > 700")


def test_printing_opens_all_details_and_closes_them_again(visit: Visit, tmp_path: Path) -> None:
    folded = "document.querySelectorAll('details:not([open])').length"
    before = visit.page.evaluate(folded)
    assert before > 0
    visit.page.evaluate(f"addEventListener('beforeprint', () => {{ window.folded = {folded}; }})")
    visit.page.pdf(path=tmp_path / "page.pdf", format="A4")
    assert (tmp_path / "page.pdf").stat().st_size > 20_000
    assert visit.page.evaluate("window.folded") == 0
    assert visit.page.evaluate(folded) == before
    visit.wait("document.querySelector('#sensitivity-0 .main-svg').getBoundingClientRect().width > 700")


@pytest.mark.slow
def test_a_picture_for_the_readme_is_small(visit: Visit, tmp_path: Path) -> None:
    page, out = visit.url.removeprefix("file://"), tmp_path / "new" / "lab.png"
    command = [sys.executable, "-m", "bench.picture", page, str(out)]
    subprocess.run(command, check=True, timeout=120)  # a second driver does not start in this process
    assert out.read_bytes().startswith(b"\x89PNG")
    assert 20_000 < out.stat().st_size <= 400_000


def test_hostile_names_are_shown_and_do_nothing(browser: Any, findings: Findings, tmp_path: Path) -> None:
    context = browser.new_context(viewport=DESKTOP, offline=True)
    visit = Visit(context.new_page(), write_report(hostile(findings), tmp_path).as_uri()).open()
    assert "<script>alert(1)</script>" in visit.page.locator("h1").text_content()
    assert visit.count("body script") == 3
    assert visit.count("img") == 0
    point = visit.page.locator("#learning-rates-0 .scatterlayer .points path").first
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    visit.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=3)
    visit.wait("document.querySelector('#learning-rates-0 .hovertext')")
    assert "<script>" in visit.page.locator("#learning-rates-0 .hovertext").first.text_content()
    assert (visit.dialogs, visit.console, visit.requests) == ([], [], [visit.url])
    # And had a name slipped through: the page's policy runs no script but its own two.
    visit.page.evaluate(
        """const node = document.createElement("script");
        node.textContent = "window.pwned = 1";
        document.body.append(node);"""
    )
    assert visit.page.evaluate("window.pwned") is None
    context.close()

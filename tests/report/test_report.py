"""The report: the page, its numbers as files, and the escaping of untrusted names."""

import base64
import csv
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.analysis.runs import ARMS, Numbers, grid, planted, write_study
from trimtab.analysis.findings import Critical, Findings, Note, Result, Status, read
from trimtab.data import MissingExtra
from trimtab.lab.study import Cell
from trimtab.report import notes_words, verdict_words, write_report
from trimtab.report import page as page_module
from trimtab.report.axes import loss_axis
from trimtab.report.files import replace_text, rows_of_cells, rows_of_curves, to_csv, to_json
from trimtab.report.numbers import between, count, duration, label, link, loss, number
from trimtab.report.page import render
from trimtab.report.texts import WORDS
from trimtab.report.training import POINTS, thin

HOSTILE = (
    """</script><script>alert(1)</script>"><img src=x onerror='alert(2)'> %{y} <b>bold</b> & javascript:alert(3)"""
)
UNKNOWN = Critical(value=1e4, low=1e4, high=1e4, measured=False, reason="no logits")


class Page(HTMLParser):
    """The elements of a page: tag, attributes, and the text between."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.text.append((self.elements[-1][0] if self.elements else "", data))

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def said(self, tag: str = "") -> str:
        return " ".join(data for name, data in self.text if tag in ("", name) and name not in ("script", "style"))

    @property
    def figures(self) -> dict[str, Any]:
        data = next(data for name, data in self.text if name == "script")
        return dict(json.loads(data))


def spiky(cell: Cell) -> Numbers:
    """As planted, with spikes in the runs that fail, and one that broke off."""
    numbers = planted(cell)
    broken = cell.arm == "plain" and cell.size == "3x64" and cell.lr == 0.3 and cell.seed == 1
    return replace(numbers, why="diverged" if broken else "done", spikes=(60,) if (numbers.logit or 0) > 150 else ())


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("study"), grid(lrs=(0.003, 0.03, 0.3), steps=80), spiky)


@pytest.fixture(scope="module")
def findings(study: Path) -> Findings:
    return read([study])


def drawn(findings: Findings, folder: Path = Path("/tmp/nowhere")) -> Page:
    return Page(render(findings, folder / "report.html", commands=["trimtab lab"], plotly="0"))


def hostile(findings: Findings) -> Findings:
    """Every text that comes from files, replaced by HTML and scripts."""

    def poison(item: Any) -> Any:
        texts = {"study": "study", "arm": f"{item.arm} {HOSTILE}"}
        texts |= {"name": f"{HOSTILE}/{item.name}", "why": HOSTILE} if isinstance(item, Result) else {}
        texts |= {"size": f"{item.size} {HOSTILE}"} if hasattr(item, "size") else {}
        return replace(item, **texts)

    lists = ("results", "curves", "fits", "forecasts", "slopes")
    changed: dict[str, Any] = {name: tuple(map(poison, getattr(findings, name))) for name in lists}
    arms = [{"name": f"{arm} {HOSTILE}", "switches": [HOSTILE]} for arm in ("plain", "steadied")]
    outside = {"name": "study", "question": HOSTILE, "subject": HOSTILE, "data": {"arms": arms}}
    sources = [replace(source, **outside) for source in findings.studies]
    results = [replace(run, sha256=HOSTILE, versions={HOSTILE: HOSTILE}) for run in changed.pop("results")]
    notes = (Note(kind="bad study", where=HOSTILE), Note(kind="failed", count=1, of=2, items=(HOSTILE,)))
    return replace(findings, **changed, notes=notes, studies=tuple(sources), results=tuple(results), comparisons=())


# --- The page


def test_the_verdict_comes_first_and_then_every_section(findings: Findings) -> None:
    page = drawn(findings)
    words = page.said()
    verdict = verdict_words(findings)
    assert page.said("h1").strip() == verdict[0]
    assert words.index(verdict[0]) < words.index(WORDS["learning-rates"].title)
    titles = [section.title for section in WORDS.values()]
    assert [data for tag, data in page.text if tag == "h2" and data in titles] == titles
    assert all(sentence in words for sentence in verdict)


def test_each_arm_has_its_charts_and_each_chart_its_words(findings: Findings) -> None:
    page = drawn(findings)
    charts = {a["id"]: a for a in page.all("div") if "chart" in a.get("class", "").split()}
    assert set(charts) == set(page.figures)
    arms = [f"{section}-{i}" for section in ("learning-rates", "logits", "gradients", "training") for i in (0, 1)]
    assert set(charts) == {*arms, "edges-0", "sensitivity-0"}
    assert all(a["role"] == "img" and len(a["aria-label"]) > 30 for a in charts.values())


def test_every_chart_is_valid_for_plotly(findings: Findings) -> None:
    go = pytest.importorskip("plotly.graph_objects")

    def paint(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: paint(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [paint(item, key) for item in value]
        named = isinstance(value, str) and value.startswith("--") and key.endswith("color")
        return "#123456" if named else value

    for figure in drawn(findings).figures.values():
        go.Figure(paint(figure))  # raises for a property that does not exist
        with pytest.raises(ValueError, match="colour"):
            go.Figure({**paint(figure), "layout": {"colour": "red"}})


def test_every_colour_that_a_chart_names_is_in_the_style(findings: Findings) -> None:
    text = render(findings, Path("report.html"), commands=(), plotly="0")
    style = text[text.index("<style>") : text.index("</style>")]
    named = set(re.findall(r'"(--[a-z0-9-]+)"', text))
    assert {"--ink", "--size-2", "--lr-2"} <= named
    light, dark = (set(re.findall(r"(--[a-z0-9-]+):", part)) for part in _schemes(style))
    assert named <= light
    assert named <= dark


def _schemes(style: str) -> tuple[str, str]:
    dark = "".join(re.findall(r"prefers-color-scheme: dark\)\s*\{\s*:root:not\(\[data-print\]\)\s*\{[^}]*\}", style))
    return style.replace(dark, ""), dark


def test_hovering_names_the_run_its_learning_rate_and_its_loss(findings: Findings) -> None:
    figures = drawn(findings).figures
    texts = [text for trace in figures["learning-rates-0"]["data"] for text in trace.get("text", [])]
    runs = [run for run in findings.results if run.arm == "plain"]
    assert len(texts) == len(runs)
    for run in runs:
        [text] = [text for text in texts if run.name in text]
        assert f"learning rate {number(run.lr)}" in text
        assert ("stopped early" if math.isinf(run.loss) else f"validation loss {run.loss:.3f}") in text


def test_failing_runs_are_crosses_and_the_others_are_not(findings: Findings) -> None:
    traces = [t for t in drawn(findings).figures["learning-rates-0"]["data"] if t["mode"] == "markers"]
    marked = {
        text.split("</b>")[0][3:]: symbol
        for t in traces
        for text, symbol in zip(t["text"], t["marker"]["symbol"], strict=True)
    }
    failing = {name for name, symbol in marked.items() if symbol == "x-thin"}
    assert failing == {run.name for run in findings.results if run.arm == "plain" and run.lr == 0.3}


def test_forecasts_stand_at_the_critical_value_in_the_shaded_part(findings: Findings) -> None:
    figure = drawn(findings).figures["logits-0"]
    diamonds = [t for t in figure["data"] if t.get("marker", {}).get("symbol") == "diamond"]
    ahead = [
        x for x in findings.forecasts if x.arm == "plain" and x.signal == "logit_max" and x.fails_at and not x.seen
    ]
    assert [t["x"] for t in diamonds] == [[x.fails_at] for x in ahead]
    assert ahead
    assert all(t["y"] == [findings.critical.value] for t in diamonds)
    shaded = next(shape for shape in figure["layout"]["shapes"] if shape.get("yref") == "paper")
    assert all(shaded["x0"] < t["x"][0] <= shaded["x1"] for t in diamonds)


def test_a_panel_lists_the_interventions_of_its_arm(findings: Findings) -> None:
    assert drawn(findings).said("small").count("qk-norm, z-loss=1e-4") == 4
    for junk in (None, "arms", [1, {"name": "steadied"}, {"name": "steadied", "switches": 3}], {"name": "plain"}):
        sources = tuple(replace(source, data={"arms": junk}) for source in findings.studies)
        assert "qk-norm, z-loss" not in drawn(replace(findings, studies=sources)).said("small")


def test_learning_rates_are_ticks_as_people_write_them(findings: Findings) -> None:
    assert drawn(findings).figures["learning-rates-0"]["layout"]["xaxis"]["ticktext"] == ["0.003", "0.03", "0.3"]


def test_commands_versions_and_data_are_on_the_page(findings: Findings) -> None:
    words = drawn(findings).said()
    run = findings.results[0]
    assert "trimtab lab" in words
    assert run.sha256 in words
    assert f"torch {run.versions['torch']}" in words


# --- What is missing


def some(findings: Findings, keep: Callable[[Any], bool]) -> Findings:
    lists = ("results", "curves", "fits", "forecasts", "slopes", "comparisons")
    return replace(findings, **{name: tuple(x for x in getattr(findings, name) if keep(x)) for name in lists})


def failed(findings: Findings) -> Findings:
    names = ("folder", "name", "study", "size", "arm", "lr", "seed")
    bare = [Result(status=Status.FAILED, **{name: getattr(r, name) for name in names}) for r in findings.results]
    return Findings(studies=findings.studies, results=tuple(bare), critical=UNKNOWN, notes=(Note(kind="failed"),))


def dull(findings: Findings) -> Findings:
    """Without signals and training losses."""
    blank = {"logit_max": math.nan, "grad_rms": math.nan, "losses": (), "params": None}
    results = tuple(replace(run, **blank) for run in findings.results)
    return replace(findings, results=results, fits=(), forecasts=(), critical=UNKNOWN)


EMPTY = {"learning-rates", "sensitivity", "logits", "gradients", "training"}
PARTIAL: dict[str, tuple[Callable[[Findings], Findings], set[str]]] = {
    "nothing": (lambda f: Findings(studies=(), results=(), critical=UNKNOWN), {*EMPTY, "runs"}),
    "all failed": (failed, EMPTY),
    "one size": (lambda f: some(f, lambda x: getattr(x, "size", "2x16") == "2x16" and not hasattr(x, "degree")), set()),
    "one arm": (lambda f: some(f, lambda x: x.arm == "plain"), set()),
    "one run": (lambda f: Findings(studies=f.studies, results=f.results[:1], critical=UNKNOWN), {"sensitivity"}),
    "no signals": (dull, {"logits", "gradients", "training"}),
}


@pytest.mark.parametrize("name", PARTIAL)
def test_a_page_shows_what_there_is_and_lists_what_is_missing(findings: Findings, name: str) -> None:
    change, missing = PARTIAL[name]
    page = drawn(change(findings))
    said = {key for key, section in WORDS.items() if section.missing and section.missing in page.said("p")}
    assert missing <= said
    shown = {key.rsplit("-", 1)[0] for key in page.figures}
    assert not shown & said
    assert shown | said >= EMPTY


def test_notes_are_on_the_page_before_the_charts(findings: Findings) -> None:
    changed = replace(findings, notes=(Note(kind="one rate", where="plain at 2x16", count=1),))
    words = drawn(changed).said()
    assert words.index(notes_words(changed)[0]) < words.index(WORDS["learning-rates"].title)


# --- Untrusted names


def test_hostile_names_stay_text_everywhere(findings: Findings) -> None:
    calm, wild = drawn(findings), drawn(hostile(findings))
    assert len(wild.all("script")) == len(calm.all("script")) == 3
    assert not wild.all("img")
    assert not [name for _, attributes in wild.elements for name in attributes if name.startswith("on")]
    assert {a["href"][:1] for a in wild.all("a")} <= {"#", "."}
    assert HOSTILE in wild.said("h1")


def test_hostile_names_stay_text_in_charts(findings: Findings) -> None:
    def strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
        if isinstance(value, dict):
            for name, item in value.items():
                yield from strings(item, name)
        elif isinstance(value, list):
            for item in value:
                yield from strings(item, key)
        elif isinstance(value, str):
            yield key, value

    figures = drawn(hostile(findings)).figures
    # Groups and meta are compared, never shown; templates are ours alone.
    shown = [(key, text) for key, text in strings(figures) if key not in ("legendgroup", "size", "seed")]
    templates = {text for key, text in shown if key == "hovertemplate"}
    assert all("alert" not in text for text in templates)
    tags = {tag for _, text in shown for tag in re.findall(r"<[^>]*>", text)}
    assert tags == {"<b>", "</b>", "<br>", "<extra>", "</extra>"}


def test_names_that_are_not_valid_text_do_not_prevent_a_page(findings: Findings, tmp_path: Path) -> None:
    odd = [replace(run, name="bytes\udcff\x00\n", arm="bytes\udcff") for run in findings.results]
    page = write_report(replace(findings, results=tuple(odd)), tmp_path)
    assert "bytes\\udcff" in page.read_text()
    assert "bytes\\udcff" in (tmp_path / "cells.csv").read_text()


def test_the_policy_lets_only_our_two_scripts_run(findings: Findings) -> None:
    text = render(findings, Path("report.html"), commands=(), plotly="var Plotly = 1;")
    page = Page(text)
    policy = page.all("meta")[1]["content"]
    ours = [data for name, data in page.text if name == "script" and not data.startswith("{") and data.strip()]
    hashes = [base64.b64encode(hashlib.sha256(data.encode()).digest()).decode() for data in ours]
    assert policy.startswith("default-src 'none'; script-src " + " ".join(f"'sha256-{one}'" for one in hashes) + ";")
    assert len(hashes) == 2


def test_nothing_on_the_page_is_loaded_from_anywhere(findings: Findings) -> None:
    page = drawn(findings)
    assert not page.all("link")
    assert not [attributes for _, attributes in page.elements if "src" in attributes]


def test_the_data_of_the_charts_cannot_end_their_script(findings: Findings) -> None:
    text = render(hostile(findings), Path("report.html"), commands=(), plotly="0")
    start = text.index('id="figures">') + len('id="figures">')
    data = text[start : text.index("</script>", start)]
    assert not set("<>&\u2028") & set(data)
    assert "alert" in data
    json.loads(data)


def test_a_label_is_one_escaped_line_of_bounded_length() -> None:
    assert label('a\n<b>"') == 'a &lt;b&gt;"'
    assert len(label("x" * 1000)) == 60


@pytest.mark.parametrize(
    "name", ["javascript:alert(1)", "a b#c?d%20", 'x"><script>', "../up", "ünïcode", "bytes\udcff"]
)
def test_a_link_leads_to_the_file_and_is_never_a_script(name: str) -> None:
    address = link(Path(name) / "log.jsonl", Path())
    assert address is not None
    assert address.startswith("./")
    assert not set('"<> #?') & set(address)
    assert unquote(address, errors="surrogateescape") == f"./{name}/log.jsonl"


# --- Files


def test_every_number_is_a_file_beside_the_page(findings: Findings, tmp_path: Path) -> None:
    page = write_report(findings, tmp_path / "new" / "folder")
    assert page == tmp_path / "new" / "folder" / "report.html"
    assert sorted(path.name for path in page.parent.iterdir()) == sorted(
        ["report.html", "findings.json", "cells.csv", "curves.csv", "fits.csv"]
    )
    assert json.loads((page.parent / "findings.json").read_text()) == to_json(findings)
    texts = {name: (page.parent / f"{name}.csv").read_text() for name in ("cells", "curves", "fits")}
    tables = {name: list(csv.DictReader(text.splitlines())) for name, text in texts.items()}
    assert [row["name"] for row in tables["cells"]] == [run.name for run in findings.results]
    assert len(tables["curves"]) == sum(len(curve.lrs) for curve in findings.curves)
    assert [float(row["lr"]) for row in tables["fits"]] == [fit.lr for fit in findings.fits]
    linked = {a["href"] for a in Page(page.read_text()).all("a")}
    assert {"./findings.json", "./cells.csv", "./curves.csv", "./fits.csv"} <= linked


def test_everything_is_json_and_tables_without_nan(tmp_path: Path) -> None:
    small = grid(sizes=("2x16",), lrs=(0.01, 0.1), seeds=(0,), arms=ARMS[:1])
    write_study(tmp_path, small, lambda cell: Numbers(why="diverged") if cell.lr == 0.1 else Numbers())
    findings = read([tmp_path])
    data = json.loads(json.dumps(to_json(findings), allow_nan=False))
    assert data["results"][1]["loss"] is None
    assert set(data) >= {"studies", "results", "curves", "fits", "critical", "forecasts", "notes", "verdict"}
    cells, curves = rows_of_cells(findings), rows_of_curves(findings)
    json.dumps([cells, curves], allow_nan=False)
    assert [row["name"] for row in cells] == [cell.name for cell in small.cells()]
    assert [(row["lr"], row["size"]) for row in curves] == [(0.01, "2x16"), (0.1, "2x16")]


def test_links_lead_to_the_files_of_the_runs_from_wherever_the_page_is(study: Path, findings: Findings) -> None:
    for folder in (study, study.parent / "elsewhere" / "deep"):
        page = drawn(findings, folder)
        leads = [a["href"] for a in page.all("a") if a["href"].endswith(".jsonl")]
        assert len(leads) == 3 * len(findings.results)
        assert all((folder / unquote(address)).resolve().is_file() for address in leads)


def test_formulas_in_names_are_not_formulas_in_a_spreadsheet() -> None:
    rows = [{"name": text, "x": -1.5} for text in ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "plain")]
    read_back = list(csv.DictReader(to_csv(rows).splitlines(keepends=True)))
    assert [row["name"][0] for row in read_back] == ["'"] * 5 + ["p"]
    assert {row["x"] for row in read_back} == {"-1.5"}


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    replace_text(path, "old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_without_plotly_the_error_names_the_extra(
    findings: Findings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingExtra, match=r"pip install 'trimtab\[lab\]'"):
        write_report(findings, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_large_study_makes_a_page_of_bounded_size(findings: Findings) -> None:
    losses = tuple((step, 2 + math.sin(step)) for step in range(400))
    many = [replace(run, name=f"{run.name}-{i}", seed=i, losses=losses) for i in range(15) for run in findings.results]
    figures = drawn(replace(findings, results=tuple(many))).figures
    points = sum(len(trace["x"]) for key in ("training-0", "training-1") for trace in figures[key]["data"])
    assert len(many) * 400 > POINTS > 0.5 * points
    assert len(json.dumps(figures)) < 3e6  # beside plotly's 5 million letters


# --- Words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.03, "0.03"),
        (0.0003, "0.0003"),
        (1e-5, "0.00001"),
        (1e-8, "1e-8"),
        (1.9134, "1.91"),
        (75432.1, "75,400"),
        (0, "0"),
        (-0.5, "−0.5"),
        (math.nan, "–"),
        (math.inf, "∞"),
        (None, "–"),
        (2.5e12, "2.5e12"),
        (1000, "1,000"),
    ],
)
def test_numbers_are_written_as_people_write_them(value: float | None, text: str) -> None:
    assert number(value) == text


def test_losses_have_the_same_decimals_and_no_minus_zero() -> None:
    assert [loss(x) for x in (2.0, 1.91349, -1e-9, -0.5, 12345.6)] == ["2.000", "1.913", "0.000", "−0.500", "12,300"]


@pytest.mark.parametrize("ends", [(2.2, 3.2), (1.9, 6.1), (0.01, 3), (2.0, 2.001), (-1, 4), (1e-3, 1e5)])
def test_loss_axes_have_a_few_round_ticks(ends: tuple[float, float]) -> None:
    axis = loss_axis(ends)
    texts = axis.get("ticktext", ["plotly", "chooses", "where", "it", "is", "plain"])
    assert 3 <= len(texts) <= 10
    assert len(set(texts)) == len(texts)


def test_counts_durations_and_ranges_are_words() -> None:
    assert [count(x) for x in (147_456, 4.8e9, 512, None)] == ["147k", "4.8B", "512", "–"]
    assert [duration(x) for x in (0.25, 42, 1000, 1e5)] == ["0.25 s", "42 s", "17 min", "28 h"]
    ranges = {(1, 2): "1–2", (None, 2): "at most 2", (1, None): "at least 1", (None, None): ""}
    assert {ends: between(*ends) for ends in ranges} == ranges


@pytest.mark.parametrize("many", [1, 2, 3, 99, 1000])
def test_thinning_keeps_the_ends_and_every_spike(many: int) -> None:
    points = [(step, 100.0 if step == 500 else 1.0) for step in range(1, many + 1)]
    kept = thin(points, 50)
    assert len(kept) <= 50
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert max(kept, key=lambda p: p[1])[1] == max(points, key=lambda p: p[1])[1]
    assert kept == sorted(set(kept))


def test_the_files_of_the_page_are_part_of_the_package() -> None:
    assert (page_module.HERE / "style.css").is_file()
    assert (page_module.HERE / "page.js").is_file()
    assert (page_module.HERE / "templates" / "page.html").is_file()

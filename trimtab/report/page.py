"""The page: the verdict, the charts and tables behind it, every run, and the commands to reproduce it.

It is one HTML file. Its content security policy allows no request, and only the two scripts whose hashes it contains: a
name that was not escaped could still not run.
"""

import base64
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trimtab.analysis.findings import Findings, Signal
from trimtab.analysis.thresholds import FIRM
from trimtab.hints import load_extra
from trimtab.report import charts, files, growth, tables, training
from trimtab.report.layout import Figure, Legend, Panel, View
from trimtab.report.numbers import count, duration, join, number, plural
from trimtab.report.sentences import critical_words, notes_words
from trimtab.report.tables import Table
from trimtab.report.texts import ABOVE_BEST, NO_PANEL, NO_SCRIPT, WORDS
from trimtab.report.verdict import verdict_words
from trimtab.runs import RunError, check_ours
from trimtab.runs.files import open_file
from trimtab.runs.folder import CONFIG, STUDY

HERE = Path(__file__).parent
MARK = '<meta name="generator" content="trimtab">'  # near the start of templates/page.html
_MARK_WITHIN = 1024  # bytes
LONG = 110  # letters; a longer headline has a smaller font


@dataclass
class Chart:
    """A chart and its heading; without `figure` the panel of an arm without data."""

    id: str
    heading: str
    switches: str
    words: str
    figure: Figure | None


@dataclass
class Section:
    """The parts of a section, in the order of the page."""

    key: str
    charts: Sequence[Chart] = ()
    note: str = ""
    choices: Any = None  # training.choices
    legend: Legend | None = None
    signs: Sequence[tuple[str, ...]] = ()  # the symbols of the charts: symbol, meaning, and the symbol's CSS class
    tables: Sequence[Table] = ()
    stable: Sequence[str] = ()

    @property
    def empty(self) -> bool:
        return not self.tables if self.key == "runs" else not any(chart.figure for chart in self.charts)


def write_report(findings: Findings, out: Path, *, commands: Sequence[str] = ()) -> Path:
    """Write the page, and its numbers as files beside it; returns the path of the page.

    `out` is the page if it ends in .html, else the folder for `report.html`. Incomplete findings make a page that lists
    what is missing.
    """
    page = check_page(out)
    plotly = load_drawing().get_plotlyjs()
    text = render(findings, page, commands=commands, plotly=plotly)
    page.parent.mkdir(parents=True, exist_ok=True)
    files.replace_text(page, text)  # first: it marks the other files as ours
    files.write_data(findings, page.parent)
    return page


def check_page(out: Path) -> Path:
    """The path of the page. Raises RunError if a file of somebody else would be replaced, or a link followed."""
    page = out if out.suffix in (".html", ".htm") else out / "report.html"
    ours = _is_ours(page) or any((page.parent / name).is_file() for name in (STUDY, CONFIG))
    if page != out and not ours:
        check_ours(out, STUDY)
    for path in (page, *(page.parent / name for name in files.NAMES)):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise RunError(f"{path} is a link or not a file, so it is not replaced; use another --out")
        if path.exists() and not ours:
            raise RunError(f"{path} was not written with this page, so it is not replaced; use another --out")
    return page


def _is_ours(page: Path) -> bool:
    try:
        with open_file(page) as file:
            return MARK.encode() in file.read(_MARK_WITHIN)
    except OSError:
        return False


def load_drawing() -> Any:
    """The drawing package. Call it before hours of training, so that a missing package is reported first."""
    load_extra("jinja2", extra="lab", purpose="the report")
    return load_extra("plotly.offline", extra="lab", purpose="the report")


def render(findings: Findings, page: Path, *, commands: Sequence[str], plotly: str) -> str:
    """The page as text, with links relative to its path."""
    jinja = load_extra("jinja2", extra="lab", purpose="the report")
    loader = jinja.FileSystemLoader(HERE / "templates")
    templates = jinja.Environment(loader=loader, autoescape=True, undefined=jinja.StrictUndefined, trim_blocks=True)
    templates.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    view, now = View(findings), datetime.now(UTC)
    sections = _sections(view, page.parent)
    scripts = [plotly, (HERE / "page.js").read_text(encoding="utf-8")]
    text: str = templates.get_template("page.html").render(
        words=WORDS,
        sections=sections,
        figures={chart.id: chart.figure for s in sections for chart in s.charts if chart.figure},
        studies=findings.studies,
        verdict=verdict_words(findings),
        notes=notes_words(findings),
        long=LONG,
        no_panel=NO_PANEL,
        no_script=NO_SCRIPT,
        style=(HERE / "style.css").read_text(encoding="utf-8") + view.scales_css(),
        scripts=scripts,
        policy=_policy(scripts),
        files=files.NAMES,
        commands=[" ".join(command.split()) for command in commands],
        when=f"{now.day} {now:%B %Y, %H:%M} UTC",
        subject=join(_once(source.subject for source in findings.studies)),
        versions=_once(", ".join(f"{name} {x}" for name, x in run.versions.items()) for run in findings.results),
        corpora=_once(run.sha256 for run in findings.results),
    )
    return text


def _policy(scripts: Sequence[str]) -> str:
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{text}'" for text in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def _sections(view: View, folder: Path) -> list[Section]:
    runs = view.findings.results
    spent, tokens = sum(run.seconds for run in runs), sum(run.tokens for run in runs)
    curve, edges = charts.sensitivity(view), charts.edges(view)
    lines = _charts(view, "training", training.training, training.training_words)
    return [
        Section(
            "learning-rates",
            _charts(view, "learning-rates", charts.lr_loss, charts.lr_loss_words),
            legend=view.size_legend(),
            signs=(("●", "a run; large: the best learning rate"), ("✕", "fails"), ("┈", "loss before training")),
            tables=tables.arms(view),
        ),
        Section(
            "edges",
            [Chart("edges-0", "", "", charts.edges_words(view), edges)] if edges else [],
            legend=view.arm_legend(),
            signs=(
                ("●", "measured, with its range over seeds"),
                ("△", "above the highest learning rate"),
                ("╌", f"trend; band: fails with a probability of {1 - FIRM:.0%} to {FIRM:.0%}"),
            ),
            tables=tables.held_out(view),
        ),
        Section(
            "sensitivity",
            [Chart("sensitivity-0", "", "", charts.sensitivity_words(view), curve)] if curve else [],
            legend=view.arm_legend(),
            tables=[*tables.comparisons(view), *tables.slopes(view)],
        ),
        _growth(view, "logits", "logit_max"),
        _growth(view, "gradients", "grad_rms"),
        Section("training", lines, choices=training.choices(view), legend=view.lr_legend()),
        Section(
            "runs",
            note=f"{plural(len(runs), 'run')}, {duration(spent)} of training, {count(tokens)} tokens. {ABOVE_BEST}",
            tables=tables.cells(view, folder),
        ),
    ]


def _growth(view: View, key: str, signal: Signal) -> Section:
    critical = view.findings.critical
    level = "Runs fail above an early logit of about " if critical.measured else "Critical attention logit: "
    return Section(
        key,
        _charts(view, key, lambda v, p: growth.growth(v, p, signal), lambda v, p: growth.growth_words(v, p, signal)),
        note=f"{level}{number(critical.value, 2)}: {critical_words(critical)}." if signal == "logit_max" else "",
        legend=view.lr_legend(),
        signs=(
            ("●", "a run"),
            ("✕", "a run that fails"),
            ("━", "fit"),
            ("━", growth.limit_words(view, signal), "fail"),
            ("╌", "beyond the largest size that was run"),
            ("◆", growth.ENDS[signal]),
            ("□", "back-test: the largest size predicted from the smaller ones"),
        ),
        tables=[*tables.forecasts(view, signal), *tables.backtests(view, signal)],
        stable=tables.stable(view, signal),
    )


def _charts(
    view: View, section: str, draw: Callable[[View, Panel], Figure | None], describe: Callable[[View, Panel], str]
) -> list[Chart]:
    """A chart per arm."""
    return [
        Chart(f"{section}-{i}", view.title(panel), view.switches(panel), describe(view, panel), draw(view, panel))
        for i, panel in enumerate(view.panels)
    ]


def _once(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(text for text in texts if text))

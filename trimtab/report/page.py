"""The page itself: the verdict first, then what it rests on, then every number and the commands that made it.

One HTML file with everything inside. Its content policy lets nothing in or out: no request leaves the page, and only
the two scripts whose hashes it names may run, so that a name which slipped through unescaped would still be dead text.
"""

import base64
import hashlib
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from trimtab.analysis.findings import Findings, Signal
from trimtab.analysis.words import join, plural
from trimtab.extras import load_extra
from trimtab.report import charts, files, growth, tables, training
from trimtab.report.layout import Figure, Panel, View
from trimtab.report.numbers import count, duration, html, number, script
from trimtab.report.texts import ABOVE_BEST, NO_PANEL, NO_SCRIPT, SECTIONS

HERE = Path(__file__).parent
LONG = 110  # letters; a longer headline is set smaller


def write_report(findings: Findings, out: Path, *, commands: Sequence[str] = ()) -> Path:
    """Write the page, and its numbers as files beside it; returns the page.

    `out` is the page if it ends in .html, else the folder for `report.html`. Missing findings make a page that says
    what is missing, never an error.
    """
    page = out if out.suffix in (".html", ".htm") else out / "report.html"
    plotly = load_drawing().get_plotlyjs()
    page.parent.mkdir(parents=True, exist_ok=True)
    files.write_data(findings, page.parent)
    files.replace_text(page, render(findings, page, commands=commands, plotly=plotly))
    return page


def load_drawing() -> Any:
    """The package that draws. Who has hours of training before the page should ask for it first."""
    return load_extra("plotly.offline", extra="lab", purpose="the report")


def render(findings: Findings, page: Path, *, commands: Sequence[str], plotly: str) -> str:
    """The page as text. Addresses in it are relative to where it will be."""
    view, figures = View(findings), dict[str, Figure]()
    body = "".join(
        (
            _header(findings),
            f"<main><noscript>{_missing(NO_SCRIPT)}</noscript>",
            _learning_rates(view, figures),
            _sensitivity(view, figures),
            _growth(view, figures, "logits", "logit_max"),
            _growth(view, figures, "gradients", "grad_rms"),
            _training(view, figures),
            _runs(view, page.parent),
            _made(findings, commands),
            "</main>",
        )
    )
    scripts = [plotly, (HERE / "page.js").read_text(encoding="utf-8")]
    style = (HERE / "style.css").read_text(encoding="utf-8") + view.scales_css()
    title = html(findings.verdict[0] if findings.verdict else "Trimtab lab")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{title}</title>\n<style>{style}</style>\n</head>\n'
        f"<body>\n{body}\n{_footer()}\n"
        f'<script type="application/json" id="figures">{script(figures)}</script>\n'
        + "\n".join(f"<script>{text}</script>" for text in scripts)
        + "\n</body>\n</html>\n"
    )


def _policy(scripts: Sequence[str]) -> str:
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{text}'" for text in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def _header(findings: Findings) -> str:
    asked = "".join(
        f'<p class="kicker"><b>{html(source.name)}</b> {html(source.question)}</p>' for source in findings.studies
    )
    headline, *rest = findings.verdict or ("Nothing can be said yet",)
    size = ' class="long"' if len(headline) > LONG else ""
    said = "".join(f"<li>{html(sentence)}</li>" for sentence in rest)
    notes = "".join(f"<li>{html(note)}</li>" for note in findings.notes)
    missing = f'<aside class="notes"><h2>What is missing</h2><ul>{notes}</ul></aside>' if notes else ""
    links = "".join(f'<li><a href="#{key}">{html(words.menu)}</a></li>' for key, words in SECTIONS.items())
    return (
        f"<header>{asked}<h1{size}>{html(headline)}</h1>{f'<ul class=verdict>{said}</ul>' if said else ''}{missing}"
        f'<nav aria-label="On this page"><ul>{links}</ul></nav></header>'
    )


def _learning_rates(view: View, figures: dict[str, Figure]) -> str:
    panels = _panels(view, figures, "learning-rates", charts.lr_loss, charts.lr_loss_words)
    key = _key(("●", "a run; large: the best learning rate"), ("✕", "fails"), ("┈", "loss before training"))
    drawn = view.size_legend() + panels + key + tables.glance(view)
    return _section("learning-rates", drawn if panels else "")


def _sensitivity(view: View, figures: dict[str, Figure]) -> str:
    chart = charts.sensitivity(view)
    if chart is None:
        return _section("sensitivity", "")
    figures["sensitivity-0"] = chart
    drawn = f'<div class="panels wide">{_figure("sensitivity-0", "", charts.sensitivity_words(view))}</div>'
    return _section("sensitivity", view.arm_legend() + drawn + tables.comparisons(view) + tables.slopes(view))


def _growth(view: View, figures: dict[str, Figure], section: str, signal: Signal) -> str:
    panels = _panels(
        view,
        figures,
        section,
        lambda view, panel: growth.growth(view, panel, signal),
        lambda view, panel: growth.growth_words(view, panel, signal),
    )
    key = _key(
        ("●", "a run"),
        ("✕", "a run that fails"),
        ("━", "fit"),
        ("━", growth.limit_words(view, signal), "fail"),
        ("╌", "beyond the models that were trained"),
        ("◆", growth.ENDS[signal]),
        ("□", "back-test: the largest size as the smaller ones foretold it"),
    )
    critical = view.findings.critical
    level = f"Runs fail above a logit of about {number(critical.value, 2)}" if critical.measured else "Critical logit"
    known = f"{level}: {critical.why}."
    why = f'<p class="lead">{html(known)}</p>' if signal == "logit_max" else ""
    listed = tables.forecasts(view, signal) + tables.backtests(view, signal)
    return _section(section, why + view.lr_legend() + panels + key + listed if panels else "")


def _training(view: View, figures: dict[str, Figure]) -> str:
    panels = _panels(view, figures, "training", training.training, training.training_words)
    return _section("training", training.boxes(view) + view.lr_legend() + panels if panels else "")


def _runs(view: View, folder: Path) -> str:
    runs = view.findings.results
    spent, tokens = sum(run.seconds for run in runs), sum(run.tokens for run in runs)
    said = f"{plural(len(runs), 'run')}, {duration(spent)} of training, {count(tokens)} tokens. {ABOVE_BEST}"
    return _section("runs", f'<p class="lead">{html(said)}</p>{tables.cells(view, folder)}' if runs else "")


def _made(findings: Findings, commands: Sequence[str]) -> str:
    """Files, commands, versions: all that is needed to make the page again."""
    data = ", ".join(f'<a href="./{name}">{name}</a> ({html(words)})' for name, words in files.NAMES.items())
    versions: dict[str, None] = {}
    for run in findings.results:
        if run.versions:
            versions[", ".join(f"{name} {version}" for name, version in run.versions.items())] = None
    corpora = dict.fromkeys(run.sha256 for run in findings.results if run.sha256)
    subjects = dict.fromkeys(source.subject for source in findings.studies if source.subject)
    facts = [("Numbers", data)]
    facts += [("Subject", html(join(list(subjects))))] if subjects else []
    facts += [("Versions", "<br>".join(map(html, versions)) or "unknown")]
    facts += [("Corpus, sha256", "<br>".join(f"<code>{html(x)}</code>" for x in corpora) or "unknown")]
    said = "".join(f"<dt>{name}</dt><dd>{words}</dd>" for name, words in facts)
    shown = "\n".join(html(" ".join(command.split())) for command in commands)
    how = f"<h3>Commands</h3><pre tabindex=0>{shown}</pre>" if shown else "<p>The commands were not recorded.</p>"
    return _section("made", f"{how}<dl>{said}</dl>")


def _panels(
    view: View,
    figures: dict[str, Figure],
    section: str,
    draw: Callable[[View, Panel], Figure | None],
    say: Callable[[View, Panel], str],
) -> str:
    """A chart per arm; empty if no arm has one."""
    drawn = []
    for i, panel in enumerate(view.panels):
        chart = draw(view, panel)
        if chart is None:
            drawn.append(f"<figure>{_heading(view, panel)}{_missing(NO_PANEL)}</figure>")
            continue
        figures[f"{section}-{i}"] = chart
        drawn.append(_figure(f"{section}-{i}", _heading(view, panel), say(view, panel)))
    some = any(key.startswith(f"{section}-") for key in figures)
    wide = " wide" if len(drawn) == 1 else ""
    return f'<div class="panels{wide}">{"".join(drawn)}</div>' if some else ""


def _figure(key: str, heading: str, words: str) -> str:
    return f'<figure>{heading}<div class="chart" id="{key}" role="img" aria-label="{html(words)}"></div></figure>'


def _heading(view: View, panel: Panel) -> str:
    switches = ", ".join(view.switches(panel))
    small = f" <small>{html(switches)}</small>" if switches else ""
    return f"<h3>{html(view.title(panel))}{small}</h3>"


def _section(key: str, body: str) -> str:
    """A section with its lead; without a body it says what is missing."""
    words = SECTIONS[key]
    said = f'<p class="lead">{html(words.lead)}</p>' if words.lead else ""
    return f'<section id="{key}"><h2>{html(words.title)}</h2>{said}{body or _missing(words.missing)}</section>'


def _missing(why: str) -> str:
    return f'<p class="missing">{html(why)}</p>'


def _key(*items: tuple[str, ...]) -> str:
    """Signs and what they mean; a third word is the class of the sign."""
    said = "".join(
        f'<li><b aria-hidden="true" class="{"".join(kind)}">{sign}</b>{html(words)}</li>'
        for sign, words, *kind in items
    )
    return f'<ul class="key">{said}</ul>'


def _footer() -> str:
    when = datetime.now(timezone.utc).strftime("%-d %B %Y, %H:%M UTC")
    return f"<footer><p>Made by <b>trimtab lab</b> on {when}. This page is one file and loads nothing.</p></footer>"

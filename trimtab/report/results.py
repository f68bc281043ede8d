"""The pages of docs/results, from the answers alone: an overall table, and one page per paper with figures.

    write_results(answers, folder)      folder/README.md, p1.md ... p4.md, all.md, figures/NAME-FIGURE.svg

Figures are drawn from the points in the answers; no number is typed.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from trimtab.analysis.answers import Answer, Cell, OutOfReach, Paper, Table, Verdict
from trimtab.report.numbers import duration, number
from trimtab.report.svg import draw

PAPERS: dict[Paper, str] = {
    "P1": "Stable and low-precision training for large-scale vision-language models (Wortsman et al. 2023a)",
    "P2": "8-bit optimizers via block-wise quantization (Dettmers et al. 2022)",
    "P3": "Small-scale proxies for large-scale Transformer training instabilities (Wortsman et al. 2023b)",
    "P4": "The stability-efficiency dilemma (Li et al. 2022)",
    "all": "The four papers together",
}
RULE = (
    "The verdict is about the claims of the paper: **reproduced** if every claim of the question's file in "
    "`trimtab/lab/questions/` holds, **partly** if the first one, the main claim, or at least half of them hold, "
    "**not** otherwise; **no answer** if runs are missing for a claim. The rules of a design were written before its "
    "runs, some after trials with other seeds; a few were made stricter later. The texts report both. A verdict of "
    "**not** led to a second design, and the first one is in the [log](../log.md)."
)
READING = """## How to read these pages

- **2x32** is a model with 2 layers of width 32. `gpt-lab` and `clip-lab` are the small models of the lab
  (`trimtab recipes`); an **arm** is one way to train them.
- Losses are in **nats**. **Best loss** is the validation loss at the best learning rate, mean over seeds.
- **Sensitivity**: the loss above the best one, averaged over the learning rates. A run that stops early, or ends above
  the loss before training, counts with the loss before training.
- **Fails from lr**: the lowest learning rate whose loss is clearly above the best, or above that of a smaller model
  ([the limit](../lab.md)). **Edge of stability**: here the learning rate between those that train and those that fail,
  not the sharpness of Cohen et al. 2021. **Stopped early**: runs that ended without a finite loss, or that the lab
  stopped because they had failed.
- **Range over seeds**: in the tables the lowest and the highest, at the best learning rate; in claims their difference.
  A difference between two arms that is smaller shows little.
- **Onset** of a loss spike: its first step. **Peak**: its highest. A **large** spike at least doubles the loss. **By
  chance**: the share of spikes that as many RMS spikes at random steps would precede. **p**: the probability that
  chance gives a number as high.
- **Noise** of the loss ratio: its 95th percentile in the last fifth of a run that trains, over the lowest one there.
  **Unstable steps**: those with a loss ratio above 1.2 times the noise.
- **Steadied**: with qk-norm and z-loss. **muParam**: learning rates and initial values that depend on the width.
- **RMS_t**: the gradient over the root of the second moment, root mean square over a tensor; near 1 while the second
  moment is up to date. **Loss ratio**: the loss over the best loss before it. **√v**: the root of Adam's second moment.
  **log Z**: the logarithm of the sum of the exponentials of the output logits.
"""
VERDICTS: tuple[Verdict, ...] = ("reproduced", "partly", "not", "no answer")
MARKS = {True: "yes", False: "no", None: "not enough runs"}


def write_results(
    answers: Sequence[Answer],
    folder: Path,
    *,
    out_of_reach: Iterable[OutOfReach] = (),
    asked: Iterable[tuple[Paper, str, str]] = (),
) -> list[Path]:
    """Write all pages; returns their paths, the overall table first. `asked` are all questions in the order of the
    pages: paper, name, text."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    asked, answered = list(asked), {answer.name for answer in answers}
    missing = [question for question in asked if question[1] not in answered]
    places = {name: place for place, (_, name, _) in enumerate(asked)}
    answers = sorted(answers, key=lambda answer: (answer.paper, places.get(answer.name, len(places))))
    written = [_write(folder / "README.md", _overview(answers, missing, list(out_of_reach)))]
    for paper, title in PAPERS.items():
        mine = [answer for answer in answers if answer.paper == paper]
        if mine:
            written.append(_write(folder / f"{paper.lower()}.md", _page(paper, title, mine)))
        for answer in mine:
            for figure in answer.figures:
                written.append(_write(folder / "figures" / f"{answer.name}-{figure.name}.svg", draw(figure)))
    for outdated in {*(folder / "figures").glob("*.svg")} - {*written}:
        outdated.unlink()  # of an answer that has been replaced
    return written


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def summarize(answers: Sequence[Answer]) -> list[str]:
    """A table with a row per paper: how many of its questions have which answer, and how many of its claims hold."""
    rows: list[list[Cell]] = []
    for paper, title in PAPERS.items():
        mine = [answer for answer in answers if answer.paper == paper]
        checks = [check for answer in mine for check in answer.checks]
        held = f"{sum(bool(check.passed) for check in checks)} of {len(checks)}"
        counts = [str(sum(answer.verdict == verdict for answer in mine)) for verdict in VERDICTS[:3]]
        rows.append([title, str(len(mine)), *counts, held])
    return _rows(("paper", "questions", *VERDICTS[:3], "claims that hold"), rows)


def _overview(
    answers: Sequence[Answer], missing: Sequence[tuple[Paper, str, str]], out_of_reach: Sequence[OutOfReach]
) -> str:
    counts = {verdict: sum(answer.verdict == verdict for answer in answers) for verdict in VERDICTS}
    found = ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n)
    found += f"; {len(missing)} not run yet" if missing else ""
    minutes = sum(answer.minutes for answer in answers)
    lines = [
        "# The papers, reproduced small",
        "",
        f"Of {len(answers) + len(missing)} questions: {found}. Models of a few thousand to a million parameters (25 "
        f"million where memory is measured), on a CPU; {minutes:.0f} minutes for the {len(answers)} that were run. "
        "`trimtab reproduce` runs all of them and writes these pages; `trimtab reproduce NAME` one.",
        "",
        RULE,
        "",
        *summarize(answers),
        "",
    ]
    rows = [(paper, text, f"not run yet: `trimtab reproduce {name}`", "", "", "") for paper, name, text in missing]
    for answer in answers:
        held = f"{sum(bool(check.passed) for check in answer.checks)} of {len(answer.checks)}"
        main = MARKS[answer.checks[0].passed] if answer.checks else ""
        design = "second" if answer.second else "first"
        rows.append((answer.paper, _link(answer, answer.question), answer.verdict, main, held, design))
    rows.sort(key=lambda row: row[0])
    lines += _rows(("paper", "question", "verdict", "main claim holds", "claims that hold", "design"), rows)
    lines += ["", *(f"- {paper}: {title}." for paper, title in PAPERS.items()), ""]
    failed = [(a.paper, _link(a, a.name), c.claim, c.evidence) for a in answers for c in a.checks if c.passed is False]
    if failed:
        lines += ["## What did not reproduce", ""]
        lines += [*_rows(("paper", "question", "claim that does not hold", "numbers"), failed), ""]
    lines += [READING]
    if out_of_reach:
        lines += ["## What is not shown here", ""]
        claims = sorted(((x.paper, x.claim, x.reason, x.needs) for x in out_of_reach), key=lambda row: row[0])
        lines += [*_rows(("paper", "claim", "why not", "what would show it"), claims), ""]
    return "\n".join(lines)


def _link(answer: Answer, text: str) -> str:
    return f"[{text}]({answer.paper.lower()}.md#{answer.name})"


def _page(paper: str, title: str, answers: Sequence[Answer]) -> str:
    lines = [f"# {paper}: {title}" if paper != "all" else f"# {title}", "", RULE, ""]
    lines += ["[How to read these pages](README.md#how-to-read-these-pages).", ""]
    for answer in answers:
        lines += _section(answer)
    return "\n".join(lines)


def _section(answer: Answer) -> list[str]:
    lines = [
        f"## {answer.name}",
        "",
        f"**{answer.question}** {_linked(answer.about)}",
        "",
        f"Verdict: **{answer.verdict}**{', of the second design' if answer.second else ''}.",
        "",
    ]
    checks = [(check.claim, MARKS[check.passed], check.evidence) for check in answer.checks]
    lines += [*_rows(("claim", "holds", "numbers"), checks), ""]
    for figure in answer.figures:
        lines += [f"![{figure.title}](figures/{answer.name}-{figure.name}.svg)", ""]
    for table in answer.tables:
        lines += _table(table)
    design, _, arms = answer.design.partition(" Arms: ")
    lines += [f"`{answer.command}`: {design} {duration(60 * answer.minutes)} on {answer.machine}, {answer.date}.", ""]
    if arms:
        lines += ['<details markdown="1"><summary>The arms and their switches</summary>', ""]
        lines += [*(f"- {arm}" for arm in arms.removesuffix(".").split("; ")), "", "</details>", ""]
    return lines


def _linked(text: str) -> str:
    """With links in place of the names of other pages."""
    return re.sub(
        r"docs/((?:results/)?([a-z0-9-]+)\.md)", lambda found: f"[{found[2]}]({_from_results(found[1])})", text
    )


def _from_results(page: str) -> str:
    return page.removeprefix("results/") if page.startswith("results/") else f"../{page}"


def _table(table: Table) -> list[str]:
    return [f"{table.title}:", "", *_rows(table.columns, table.rows), ""]


def _rows(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(map(_cell, row))} |" for row in rows]


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell.replace("|", "\\|")
    return f"{cell:,}" if isinstance(cell, int) else number(cell)

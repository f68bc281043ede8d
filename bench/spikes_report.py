"""The tables of bench.spikes: what RMS spikes say about loss spikes, over all runs of a setting."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from trimtab.analysis.one_run import losses_of, rms_of
from trimtab.analysis.spike_counts import LARGE, RULES, Moment, count, race
from trimtab.runs.reader import Run

FIRST_LAYER = {"clip": "visual.conv1.weight", "gpt": "embedding.weight"}
ANY = "any tensor"


def _race_row(r: dict[str, Any]) -> tuple[Any, ...]:
    known = [x for x in r["ahead"] if x is not None]
    first, same, later = (sum(map(test, known)) for test in (lambda x: x > 0, lambda x: x == 0, lambda x: x < 0))
    won = f"{statistics.median(known):g}" if known else "–"
    return len(r["ahead"]), first, same, later, len(r["ahead"]) - len(known), won


def write_report(runs: Mapping[str, list[Run]], settings: Mapping[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """The page in Markdown, and its numbers."""
    adamw = [run for name, some in runs.items() for run in some if settings[name]["optimizer"] == "adamw"]
    data: dict[str, Any] = {"rules": asdict(RULES), "settings": dict(settings)}
    lines = [HEAD, *_settings_table(settings, runs)]
    for moment, title in TITLES.items():
        groups = {name: _count_setting(some, settings[name]["model"], moment) for name, some in runs.items()}
        groups |= {"all AdamW": {ANY: asdict(count(adamw, None, moment))}} if adamw else {}
        data[moment] = groups
        lines += ["", title, "", *LEGEND[moment], ""]
        lines += _count_table({(name, which): c for name, group in groups.items() for which, c in group.items()})
    races = {name: asdict(race(some)) for name, some in runs.items()}
    data["race"] = races
    lines += [
        "",
        "## The race: which alarm sounds first in a large spike, RMS_t or the loss itself?",
        "",
        *RACE_LEGEND,
        "",
    ]
    head = ("setting", "large spikes", "RMS_t first", "same step", "loss first", "RMS_t never", "steps won, median")
    rows = [(name, *map(str, _race_row(r))) for name, r in races.items()]
    lines += [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]
    if adamw:
        rules = [(f"RMS ≥ {limit:g}", replace(RULES, rms=limit)) for limit in (1.8, 2.3, 3.0, 4.0, 6.0)]
        rules += [(f"window {window}", replace(RULES, window=window)) for window in (30, 100)]
        scan = {name: {m: asdict(count(adamw, None, m, rule)) for m in TITLES} for name, rule in rules}
        for share in (0.1, 0.25, 0.5):
            name = f"{share:.0%} of the tensors at once"
            scan[name] = {m: asdict(count(adamw, None, m, share=share)) for m in TITLES}
        data["other rules"] = scan
        lines += ["", "## Other constants, all AdamW runs, any tensor", ""]
        lines += _count_table({(name, m): c for name, group in scan.items() for m, c in group.items()})
        lines[1:1] = _in_short(data, adamw)
    return "\n".join(lines) + "\n", _clean(data)


def _in_short(data: dict[str, Any], adamw: Sequence[Run]) -> list[str]:
    """What the tables say, in sentences that cannot say anything else."""
    onset, peak = (data[moment]["all AdamW"][ANY] for moment in ("onset", "peak"))
    many = data["other rules"]["25% of the tensors at once"]["peak"]
    ahead = race(adamw).ahead
    won = sum(x is not None and x > 0 for x in ahead)
    return [
        f"In short, over {onset['runs']} AdamW runs of {onset['steps']:,} counted steps, RMS_t of any tensor:",
        "",
        f"- {_share(onset['preceded'], onset['loss_spikes'])} loss spikes began after an RMS spike, "
        f"{onset['chance']:.0%} would by chance (p {onset['p']:.2g}); "
        f"{_share(onset['same_step'], onset['loss_spikes'])} began in the very same step.",
        f"- {_share(peak['preceded'], peak['loss_spikes'])} large spikes had an RMS spike before their peak, "
        f"{peak['chance']:.0%} would by chance (p {peak['p']:.2g}); median lead "
        f"{statistics.median(peak['leads'] or [math.nan]):g} steps. In {_share(won, len(ahead))} it sounded before "
        "the alarm of the loss itself.",
        f"- {_share(peak['false_alarms'], peak['rms_spikes'])} RMS spikes had no large spike after them "
        f"({_share(onset['loss_spikes'] - peak['loss_spikes'], onset['loss_spikes'])} loss spikes were not large). "
        f"Asking for a quarter of the tensors at once, {_share(many['false_alarms'], many['rms_spikes'])}, and "
        f"{_share(many['preceded'], many['loss_spikes'])} large spikes are still preceded.",
        "",
    ]


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.0%})" if whole else "0 of 0"


def _count_setting(runs: Sequence[Run], model: str, moment: Moment) -> dict[str, dict[str, Any]]:
    """All tensors, the first layer, and the tensor that looks best: chosen afterwards, so its p is too small."""
    names = list(rms_of(runs[0])[1])
    counts = {name: count(runs, name, moment) for name in names}
    best = min(names, key=lambda name: (counts[name].p, counts[name].false_alarms))
    found = {ANY: count(runs, None, moment), FIRST_LAYER[model]: counts[FIRST_LAYER[model]]}
    if counts[best].preceded:
        found[f"{best} (best of {len(names)})"] = counts[best]
    return {name: asdict(c) for name, c in found.items()}


def _settings_table(settings: Mapping[str, dict[str, Any]], runs: Mapping[str, list[Run]]) -> list[str]:
    head = ("setting", "optimizer", "lr", "β₂", "batch", "input changes", "runs x steps", "highest late / last loss")
    rows = [head, ("---",) * len(head)]
    for name, s in settings.items():
        ends = []
        for run in runs[name]:
            steps, losses = losses_of(run)
            ends.append(f"{np.nanmax(losses[steps > RULES.ignore]):.2g} / {np.nanmedian(losses[-50:]):.2g}")
        changes = "yes" if s["changes"] else "no"
        size = f"{len(runs[name])} x {s['steps']}"
        row = (name, s["optimizer"], f"{s['lr']:g}", f"{s['beta2']:g}", s["batch"], changes, size, ", ".join(ends))
        rows.append(tuple(map(str, row)))
    return [f"| {' | '.join(row)} |" for row in rows]


def _count_table(counts: Mapping[tuple[str, str], dict[str, Any]]) -> list[str]:
    head = ("", *COLUMNS, "same step", "after")
    rows = [head, ("---",) * len(head)]
    for (setting, which), c in counts.items():
        late, early = c["loss_spikes"], c["rms_spikes"]
        share = f"{c['preceded']} ({c['preceded'] / late:.0%})" if late else "–"
        false = f"{c['false_alarms']} ({c['false_alarms'] / early:.0%})" if early else "–"
        lead = f"{statistics.median(c['leads']):g}" if c["leads"] else "–"
        p = f"{c['p']:.1e}" if late else "–"
        row = (setting, which, late, early, share, f"{c['chance']:.1%}", p, lead, false, c["same_step"], c["after"])
        rows.append(tuple(map(str, row)))
    return [f"| {' | '.join(row)} |" for row in rows]


def _clean(data: Any) -> Any:
    """A NaN is not JSON."""
    if isinstance(data, dict):
        return {key: _clean(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_clean(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


HEAD = """# Do RMS spikes precede loss spikes, at a size for a laptop?

Made by `python -m bench.spikes`: small runs, made unstable on purpose; every number of this page comes from that
command. The GPT has 2 blocks of width 64 and reads bytes of Python's own sources, in windows of 32: 32 windows in every
batch, or all the text in batches of 16. The CLIP has 2 image blocks and 1 text block of width 32 and reads 440 drawn
shapes. Where the input changes, it does so for 40 of every 200 steps: contrast x4, or upper and lower case swapped.

What was decided when. The paper's rule (first table) was fixed beforehand, except for its window and its ignored steps.
Eighteen earlier runs, not counted here, served to find settings whose loss spikes; their RMS_t was looked at too. The
window of 50 was taken after the first large-batch runs, which are among those below. When these had shown that the
answer to the first table is no, the other questions were added: the peaks of large spikes, the race, and the share of
the tensors. A peak was first looked for within 10 steps of the onset (26 of 32 preceded); that missed one spike, so
it is now looked for over the whole spike. The contrast setting had β₂ 0.999 at first, which repeated the steps of
another setting. Everything but the first table is therefore exploration: its p-values are no test. The question
[rms-spikes](p1.md#rms-spikes) tests these rules on fresh runs.
"""
TITLES: dict[Moment, str] = {
    "onset": "## The paper's rule: is there an RMS spike before a loss spike begins?",
    "peak": "## Large spikes: is there an RMS spike before the peak of the loss?",
}
LEGEND: dict[Moment, list[str]] = {
    "onset": [
        f"RMS spike: RMS_t ≥ {RULES.rms:g}. Loss spike: {RULES.deviating} of {RULES.gap} steps at least",
        f"{RULES.deviations:g} deviations above the mean of the {RULES.window} steps before. Spikes of a kind (and a",
        f"tensor) within {RULES.gap} steps are one, dated at the first; the first {RULES.ignore} steps do not count.",
        f"Preceded: an RMS spike {RULES.lead[0]} to {RULES.lead[1]} steps before. By chance: what a blind guess would",
        "precede; p: the binomial tail. Same step, after: loss spikes with an RMS spike in the very step, or as soon",
        "after it. Where `after` is as large as `preceded`, RMS_t goes with the spike and does not predict it.",
    ],
    "peak": [
        f"Only loss spikes whose highest loss is at least {LARGE:g} times the usual one before them, dated where it is",
        "highest. In a batch without noise the smallest rise is 3.2 deviations, so the onset comes before anybody",
        "would call it a spike; the peak is where the harm is done, and an action must come before it. The loss rises",
        "before its peak too, so p says that RMS_t rises with it, not that RMS_t knows more than the loss: for that,",
        "see the race below.",
    ],
}
RACE_LEGEND = [
    f"The loss sounds the alarm when {RULES.deviating} steps have deviated, RMS_t at the first step with some tensor",
    f"at {RULES.rms:g} or above, looked for from {RULES.lead[1]} steps before the onset to the peak.",
]
COLUMNS = ("RMS_t of", "loss spikes", "RMS spikes", "preceded", "by chance", "p", "median lead", "false alarms")

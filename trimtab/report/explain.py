"""What went wrong in a run, in words, with the evidence: `print(explain("runs/gpt"))`.

What is looked for, the gravest first (findings.py has the rules):

    not finite     a loss or a tensor that is NaN or infinite, and which was first
    divergence     the loss ends far above its best
    loss spikes    and the tensor whose RMS_t rose before them
    logits         attention logits that grow (cure: qk-norm)
    logZ           output logits that drift (cure: z-loss)
    eps            gradients so small that Adam's eps shrinks the update
    skips          steps that were not taken
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trimtab.analysis.one_run import losses_of
from trimtab.analysis.spikes import PAPER, SpikeRules
from trimtab.analysis.trouble import (
    Finding,
    find_divergence,
    find_logit_growth,
    find_logz_drift,
    find_loss_spikes,
    find_near_eps,
    find_not_finite,
    find_skips,
)
from trimtab.runs.reader import Run, read_run

LOOKS: tuple[Callable[[Run, SpikeRules], Finding | None], ...] = (
    find_not_finite,
    find_divergence,
    find_loss_spikes,
    find_logit_growth,
    find_logz_drift,
    find_near_eps,
    find_skips,
)


@dataclass(frozen=True)
class Explanation:
    folder: Path
    summary: str
    findings: list[Finding]

    def __bool__(self) -> bool:
        """Did something go wrong?"""
        return bool(self.findings)

    def __str__(self) -> str:
        found = [f"{i}. {finding}" for i, finding in enumerate(self.findings, start=1)]
        return "\n\n".join([self.summary, *(found or ["Nothing went wrong that these files show."])])


def explain(folder: Run | str | Path, rules: SpikeRules | None = None) -> Explanation:
    """Look for every kind of trouble; the gravest comes first, then the earliest."""
    run = folder if isinstance(folder, Run) else read_run(folder)
    steps, _ = losses_of(run)
    rules = rules or PAPER.fitted(int(steps[-1]) if len(steps) else 0)
    found = [finding for look in LOOKS if (finding := look(run, rules)) is not None]
    return Explanation(run.folder, _summary(run), found)


def _summary(run: Run) -> str:
    steps, losses = losses_of(run)
    finite = losses[np.isfinite(losses)]
    why = (run.result or {}).get("why")
    end = f"ended: {why}" if why else "not finished (there is no result.json)"
    loss = (
        f"; loss {finite[0]:.4g} at first, {finite.min():.4g} at best, {finite[-1]:.4g} at last" if len(finite) else ""
    )
    watched = f"; signals of {len(run.signals.steps)} steps" if len(run.signals.steps) else "; no signals.jsonl"
    broken = f"; {run.broken} lines could not be read" if run.broken else ""
    return f"{run.folder}: {len(steps)} steps, {end}{loss}{watched}{_alarms(run)}{broken}"


def _alarms(run: Run) -> str:
    counts = Counter(str(alarm.get("kind", "?")) for alarm in run.of_kind("alarm"))
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    return f"; {counts.total()} alarms ({kinds})" if counts else ""

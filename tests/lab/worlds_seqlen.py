"""Worlds in which the paper on sequence length warmup is right, and in which it is wrong: see test_questions.py."""

import math

import numpy as np

from trimtab.analysis.one_run import VARIANCE, Analysis, Correlation, Course, Evaluation, LossRatios
from trimtab.analysis.spikes import PAPER
from trimtab.lab.study import Cell
from trimtab.train.last_word import LastWords

STEPS = np.arange(1, 251)


def measured(
    bad: float, level: float, *, early: float = 1.0, r: float = 0.5, evaluations: tuple[Evaluation, ...] = ()
) -> Analysis:
    """A run with so many steps at a loss ratio of `level` after its middle."""
    ratios = np.ones(len(STEPS))
    ratios[120 : 120 + round(bad)] = level
    variance = {name: Course(STEPS, early * np.exp(-abs(STEPS - 50) / 50)) for name in VARIANCE}
    correlations = {name: Correlation(r, 1e-6, len(STEPS), 0.01) for name in VARIANCE}
    return Analysis(PAPER, [], [], LossRatios(ratios, 1.05), correlations, variance, 50, list(evaluations))


def dilemma(cell: Cell, sign: int = 1) -> dict:
    worse = sign * (math.log10(cell.lr) * 10 + cell.config.batch / 4)
    return {"loss": 2.0, "analysis": measured(40 + worse, 5 + worse / 5, r=0.3 * sign)}


def length(cell: Cell, sign: int = 1) -> dict:
    size = int(cell.arm.split()[1])
    return {"loss": 2 + sign / size, "analysis": measured(40 + sign * size / 4, 4 + sign * size / 50)}


def seqlen_warmup(cell: Cell, sign: int = 1) -> dict:
    bad = {"full length": 60, "sequence length": 20}.get(cell.arm, 40)
    loss = 2 + 0.01 * bad * sign + 0.5 * cell.arm.endswith("steps")
    return {"loss": loss, "seconds": float(bad), "analysis": measured(bad, 2 + sign * bad / 50, early=bad)}


def pacing(cell: Cell, jump: float = 2.0) -> dict:
    ratios = np.ones(len(STEPS))
    ratios[75:80] = jump if cell.arm == "two-stage" else 1.0
    found = measured(0, 1.0)
    return {"loss": 2.0, "analysis": Analysis(PAPER, [], [], LossRatios(ratios, 1.05), {}, found.variance)}


def reached(loss: float, cost: float) -> tuple[Evaluation, ...]:
    """A loss that falls by a tenth at each evaluation, to this one."""
    return tuple(Evaluation(1e5 * cost * i, cost * i, loss + 0.1 * (10 - i)) for i in range(11))


def headline(cell: Cell, factor: float = 2.0) -> dict:
    warm = cell.arm == "sequence length"
    loss = 2 + 0.1 * abs(math.log10(cell.lr / 0.015)) - 0.2 * warm
    runs = measured(0, 1.0, evaluations=reached(loss, 1 / factor if warm else 1.0))
    return {"loss": loss, "analysis": runs, "words": LastWords(0.5, 0.0, 20.0, 256)}


def together(cell: Cell, conflict: float = 0.0) -> dict:
    loss = 2.0 + conflict * (cell.arm == "all") + (0.5 if cell.arm == "plain" and cell.lr > 0.05 else 0)
    cost = 0.5 if cell.arm == "all" else 1.0
    return {"loss": loss, "seconds": 10 * cost, "analysis": measured(0, 1.0, evaluations=reached(loss, cost))}


def together_pairs(cell: Cell, conflict: float = 0.0) -> dict:
    """z-loss lowers the loss, and so does every pair with it; a conflict raises that with SwitchBack."""
    loss = 2.0 - 0.1 * ("z-loss" in cell.arm) + conflict * (cell.arm == "SwitchBack + z-loss")
    return {"loss": loss, "seconds": 10.0}


def together_edge(cell: Cell, sign: int = 1) -> dict:
    steep = 0.3 + 0.2 * sign * {"plain": 1, "qk-norm": 0, "all": -1}[cell.arm]
    return {"loss": 2 + steep * math.log10(cell.lr / 0.01) ** 2}


PAPERS = {
    "dilemma": dilemma,
    "length": length,
    "seqlen-warmup": seqlen_warmup,
    "pacing": pacing,
    "headline": headline,
    "together": together,
    "together-edge": together_edge,
    "together-pairs": together_pairs,
}
OTHERS = {
    "dilemma": lambda cell: dilemma(cell, -1),
    "length": lambda cell: length(cell, -1),
    "seqlen-warmup": lambda cell: seqlen_warmup(cell, -1),
    "pacing": lambda cell: pacing(cell, 1.0),
    "headline": lambda cell: headline(cell, 0.5),
    "together": lambda cell: together(cell, 0.5),
    "together-edge": lambda cell: together_edge(cell, -1),
    "together-pairs": lambda cell: together_pairs(cell, 0.05),
}

"""How the questions about sequence lengths measure instability: noise is not a failure, and a failure is not noise."""

from types import SimpleNamespace

import numpy as np

from trimtab.analysis.one_run import loss_ratios
from trimtab.lab.questions.lengths.unstable import LIMIT, above_noise, noise, unstable


def run_of(losses):
    return SimpleNamespace(ratios=loss_ratios(losses))


def course(end, size=0.02):
    """Falls from 5.5 to 2.5 in 60 steps, then stays at `end`."""
    drawn = np.random.default_rng(0).normal(1, size, 250)
    return np.concatenate([np.linspace(5.5, 2.5, 60), np.full(190, end)]) * drawn


NOISE = noise(run_of(course(2.5)))  # of a run that trains


def test_a_run_that_never_recovers_is_unstable():
    found = run_of(course(3.5))
    assert NOISE < LIMIT < found.ratios.floor  # the whole run would say that all of it is noise
    assert unstable(found, NOISE) > 50
    assert above_noise(found, NOISE) > LIMIT


def test_noise_alone_is_not():
    found = run_of(course(2.5, size=0.05))
    assert 1.05 < noise(found) < LIMIT * 1.2
    assert unstable(found, noise(found)) < 1


def test_a_run_that_ends_without_a_finite_loss_has_a_noise_all_the_same():
    losses = course(2.5)
    losses[200:] = np.nan
    assert noise(run_of(losses)) == 1.0
    assert unstable(run_of(losses), NOISE) > 15

"""The tables of bench.spikes count what they say, and its runs can be read back."""

from pathlib import Path

import numpy as np
import pytest

from bench.spikes import Setting, changes, train
from bench.spikes_report import write_report
from trimtab.analysis.spike_counts import count, large_spikes, race
from trimtab.runs.reader import Run

SETTING = {"model": "clip", "optimizer": "adamw", "lr": 1.0, "beta2": 0.9, "batch": 1, "steps": 400, "changes": False}


def run(rms_at, onset=300, peak=9.0):
    """A quiet run whose loss leaves its mean at `onset` and peaks two steps later; conv1 spikes at `rms_at`."""
    losses = 2 + 0.01 * np.random.default_rng(0).standard_normal(400)
    losses[onset - 1 : onset + 3] = 2.3, 2.6, peak, 3.0
    found = Run(Path())
    for step, loss in enumerate(losses, start=1):
        found.log.add(step, [("loss", loss)])
        rms = 5.0 if step in rms_at else 1.0
        found.signals.add(step, [("tensors/visual.conv1.weight/rms", rms), ("tensors/other/rms", 1.0)])
    return found


@pytest.mark.parametrize(
    ("rms_at", "onset", "peak", "ahead"),
    [(297, 1, 1, 4), (300, 0, 1, 1), (301, 0, 1, 0), (302, 0, 0, -1), (310, 0, 0, None), (294, 1, 1, 7)],
)
def test_an_announcement_comes_before_the_onset_or_the_peak(rms_at, onset, peak, ahead):
    some = [run({rms_at}), run({rms_at})]
    assert count(some, None, "onset").preceded == 2 * onset
    assert count(some, "visual.conv1.weight", "peak").preceded == 2 * peak
    assert count(some, "other", "peak").rms_spikes == 0
    assert race(some).ahead == [ahead, ahead]


def test_counts_are_added_up_over_runs():
    some = [run({297, 200}), run({100}), run({300})]
    found = count(some, None, "onset")
    assert (found.runs, found.loss_spikes, found.rms_spikes, found.preceded) == (3, 3, 4, 1)
    assert (found.leads, found.false_alarms, found.same_step, found.after) == ([3], 3, 1, 0)
    assert found.chance == pytest.approx((16 + 8 + 8) / 3 / 340)
    assert count(some, None, "peak").leads == [2, 5]


@pytest.mark.parametrize(("share", "preceded"), [(0.5, 1), (0.6, 0)])
def test_alarms_may_ask_for_a_share_of_the_tensors(share, preceded):
    assert count([run({297})], None, "onset", share=share).preceded == preceded  # one of the two tensors is high


def test_a_spike_is_large_if_it_doubles_the_loss():
    assert large_spikes(run(set(), peak=9.0)) == [(300, 302)]
    assert large_spikes(run(set(), peak=3.5)) == []


def test_the_report_has_every_table_and_is_json():
    text, data = write_report({"clip": [run({297}), run(set())]}, {"clip": SETTING})
    assert "| clip | any tensor | 2 | 1 | 1 (50%) |" in text
    assert "| clip | 2 | 1 | 0 | 0 | 1 | 4 |" in text
    assert data["onset"]["clip"]["any tensor"]["leads"] == [3]


def test_inputs_change_for_a_while_now_and_then():
    setting = Setting(model="gpt", lr=0.01, beta2=0.99, batch=2, steps=450, changes=True)
    changed = [step for step, now in enumerate(changes(setting), start=1) if now]
    assert changed == [*range(201, 240), *range(400, 440)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of its own for the pictures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("optimizer", ["adamw", "stable_adamw"])
def test_a_run_is_trained_to_a_folder_with_the_rms_of_every_tensor(tmp_path, optimizer):
    setting = Setting(model="clip", lr=1e-3, beta2=0.99, batch=4, steps=3, optimizer=optimizer)
    found = train(setting, 0, tmp_path / "run")
    assert found.log.steps.tolist() == [1, 2, 3]
    assert (tmp_path / "run" / "result.json").exists()
    rms = found.signals.tensors("rms")
    assert len(rms) == 50
    # At the first step every gradient is as large as its second moment says.
    assert rms["visual.conv1.weight"][0] == pytest.approx(1, abs=1e-3)
    assert 0 < rms["visual.conv1.weight"][1] < 2

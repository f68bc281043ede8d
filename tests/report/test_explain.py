"""`explain` reports what went wrong, when, where first and how long before the loss, from files alone."""

import json
import math

import numpy as np
import pytest

from trimtab.report.explain import explain

STEPS = 400


class Folder:
    """A run of `STEPS` quiet steps; a test spoils what it is about, then calls `explain`."""

    def __init__(self, path):
        self.path = path
        noise = np.random.default_rng(0).standard_normal(STEPS)
        self.losses = 4 * np.exp(-np.arange(STEPS) / 40) + 2 + 0.01 * noise
        self.rms = {"first.weight": np.ones(STEPS), "second.weight": np.ones(STEPS)}
        self.grads = {name: np.full(STEPS, 1e-3) for name in self.rms}
        self.logits = {f"blocks.{i}.attention": np.full(STEPS, 4.0) for i in range(2)}
        self.logz = np.full(STEPS, 5.0)
        self.events: list[dict] = []
        self.config: dict = {"config": {"optim": {"eps": 1e-8}}}

    def write(self):
        log, signals = [], []
        for i in range(STEPS):
            loss = number(self.losses[i])
            log.append({"step": i + 1, "loss": loss, "lr": 1e-3})
            tensors = {n: {"rms": number(self.rms[n][i]), "grad_rms": number(self.grads[n][i])} for n in self.rms}
            layers = {n: {"logit_max": number(x[i]), "entropy": 9 - i / 100} for n, x in self.logits.items()}
            totals = {"logz": number(self.logz[i])}
            signals.append({"step": i + 1, "loss": loss, "tensors": tensors, "layers": layers, "totals": totals})
        for name, rows in (("log", log), ("signals", signals), ("events", self.events)):
            (self.path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (self.path / "config.json").write_text(json.dumps(self.config))
        (self.path / "result.json").write_text(json.dumps({"why": "done"}))

    def explain(self):
        self.write()
        return explain(self.path)

    def only(self, kind):
        """The one finding there is, which must be of this kind."""
        found = self.explain()
        assert [finding.kind for finding in found.findings] == [kind], str(found)
        return found.findings[0]


def number(x):
    return float(x) if math.isfinite(x) else None


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_a_quiet_run_has_nothing_to_explain(folder):
    found = folder.explain()
    assert not found
    assert "no problem" in str(found)
    assert "400 steps, ended: done; loss 6" in str(found)


def test_a_loss_spike_is_traced_to_the_tensor_that_spiked_first(folder):
    folder.losses[[299, 300, 301]] = 5.0
    folder.rms["second.weight"][293] = 4.5
    folder.rms["first.weight"][296] = 9.0
    found = folder.only("loss spike")
    assert (found.step, found.where) == (300, "second.weight")
    text = str(found)
    assert "second.weight was first, RMS_t 4.50 at step 294, 6 steps before, then 1 more" in text
    assert "the loss rises from 2" in text
    assert "to 5 at step 300" in text
    assert "StableAdamW" in found.advice


def test_a_loss_spike_without_an_rms_spike_names_no_tensor(folder):
    folder.losses[[299, 300]] = 5.0
    folder.rms["first.weight"][150] = 9.0
    found = folder.only("loss spike")
    assert found.where == ""
    assert "no tensor's RMS_t rose before" in str(found)
    assert "1 of 1 RMS spikes had no loss spike after them" in str(found)
    assert "batches" in found.advice


def test_the_worst_spike_is_the_highest_and_small_ones_are_left_out(folder):
    folder.losses[[199, 200]] = 3.0
    folder.losses[299:302] = 2.3, 9.0, 4.0
    folder.losses[[349, 350]] = 2.15
    folder.losses[320:345] = 2 + (folder.losses[320:345] - 2) / 9  # quiet enough for 2.15 to be a spike
    folder.rms["first.weight"][299] = 3.0
    found = folder.only("loss spike")
    assert found.what == "Loss spikes: 2, the first at step 200, the worst at step 301."
    assert found.where == "first.weight"
    assert "RMS_t 3.00 at step 300, not before the onset, 1 steps before the peak" in str(found)


def test_a_small_rise_is_not_a_spike(folder):
    folder.losses[[299, 300]] = 2.15
    assert not folder.explain()


def test_a_slow_divergence_is_dated_at_the_best_loss(folder):
    folder.losses[200:] += np.linspace(0, 2, 200)  # where it begins may look like a spike as well
    found = folder.explain().findings[0]
    assert found.kind == "divergence"
    assert 200 <= found.step <= 224  # a tenth of the way up is still about as good
    assert "ends 1.9 above it" in found.what


@pytest.mark.parametrize(("rise", "diverges"), [(0.08, False), (0.13, True)])
def test_a_run_that_ends_more_than_the_margin_of_the_lab_above_its_best_diverges(folder, rise, diverges):
    folder.losses[300:] += rise
    assert ["divergence"] * diverges == [finding.kind for finding in folder.explain().findings]


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.5])
def test_noise_alone_is_no_divergence(folder, noise):
    for seed in range(10):
        folder.losses = 3 + noise * np.random.default_rng(seed).standard_normal(STEPS)
        assert "divergence" not in [finding.kind for finding in folder.explain().findings]


def test_a_short_run_diverges_too(tmp_path):
    losses = [*np.linspace(6, 2.5, 20), *np.linspace(2.6, 4.5, 12)]
    rows = [{"step": i + 1, "loss": loss} for i, loss in enumerate(losses)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "divergence" in [finding.kind for finding in explain(tmp_path).findings]


def test_one_loss_far_above_the_others_is_a_bad_batch_and_two_in_a_row_are_a_spike(folder):
    folder.losses[299] = 5.0
    found = folder.only("bad batch")
    assert found.step == 300
    assert "step 300: 5, usually 2" in str(found)
    assert "gradient clipping" in found.advice
    folder.losses[300] = 5.0
    assert folder.only("loss spike").step == 300


@pytest.mark.parametrize("value", [60.0, np.nan])
def test_an_explosion_in_the_first_steps_comes_first_and_is_no_divergence(folder, value):
    folder.losses[5:] = value
    found = folder.explain().findings
    assert "divergence" not in [finding.kind for finding in found]
    assert (found[0].kind, found[0].step) == ("explosion", 6)
    assert "at learning rate 0.001" in found[0].what
    assert "the loss was 6.001 before training" in str(found[0])


def test_the_first_loss_of_a_log_that_starts_in_the_middle_is_not_that_before_training(folder):
    text = "".join(json.dumps({"step": i + 500, "loss": 1.0 + 5 * (i > 2)}) + "\n" for i in range(12))
    (folder.path / "log.jsonl").write_text(text)
    assert "explosion" not in [finding.kind for finding in explain(folder.path).findings]


def test_a_divergence_after_a_long_level_stretch_is_dated_at_its_end_and_traced_to_the_spike(folder):
    folder.losses[:] = 2 + 0.01 * np.sin(np.arange(STEPS)) + np.linspace(0, 0.1, STEPS)
    folder.losses[300:] = np.linspace(9, 5, 100)
    found = folder.explain().findings[0]
    assert (found.kind, found.step) == ("divergence", 296)
    assert "it began with the loss spike at step 301" in str(found)


def test_losses_that_are_noisy_but_level_do_not_diverge(folder):
    folder.losses = 2 + np.abs(np.random.default_rng(1).standard_normal(STEPS))
    assert "divergence" not in [finding.kind for finding in folder.explain().findings]


@pytest.mark.parametrize("layer", [0, 1])
def test_attention_logits_that_grow_name_the_layer_and_the_lead(folder, layer):
    folder.logits[f"blocks.{layer}.attention"][200:] = np.geomspace(4, 4000, 200)
    folder.losses[380:] = 9.0
    found = {finding.kind: finding for finding in folder.explain().findings}["attention logits"]
    assert found.where == f"blocks.{layer}.attention"
    assert found.step == 274  # 4 * 1000^(73/199) is the first above 50
    assert "4 early, 4e+03 at most" in str(found)
    assert "107 steps before the loss" in str(found)
    assert "entropy went from 9 to 5.01" in str(found)
    assert "qk-norm" in found.advice


def test_logits_that_are_large_from_the_first_measurement_on_are_found(folder):
    folder.logits["blocks.1.attention"][:] = 500.0
    found = folder.only("attention logits")
    assert (found.step, found.where) == (1, "blocks.1.attention")
    assert "are large from the first measurement on" in found.what


def spoil(folder, kind):
    match kind:
        case "loss spike":
            folder.losses[[299, 300, 301]] = 5.0
            folder.rms["second.weight"][293] = 4.5
        case "attention logits":
            folder.logits["blocks.0.attention"][200:] = np.geomspace(4, 4000, 200)
        case "logZ":
            folder.logz = np.linspace(0, -40, STEPS)
        case "eps":
            folder.grads["second.weight"][:] = 1e-16
        case "divergence":
            folder.losses[200:] += np.linspace(0, 2, 200)
        case "non-finite":
            folder.losses[300:] = np.nan


@pytest.mark.parametrize(
    ("kind", "remedy", "has"),
    [
        ("attention logits", "qk-norm", {"model": {"qk_norm": "shared"}}),
        ("attention logits", "qk-norm", {"model": {"qk_norm": "off", "kappa": 2.0}}),
        ("divergence", "qk-norm", {"model": {"qk_norm": "whole"}}),
        ("divergence", "independent weight decay", {"optim": {"independent_decay": True}}),
        ("divergence", "longer warmup", {"steps": 4}),  # the highest learning rate is that of step 1
        ("non-finite", "z-loss", {"model": {"z_loss": 1e-4}}),
        ("non-finite", "float32", {"autocast": "off"}),
        ("logZ", "z-loss (1e-4)", {"model": {"z_loss": 1e-4}}),
        ("eps", "a smaller eps", {"optim": {"eps": 1e-15}}),
        ("loss spike", "StableAdamW", {"optim": {"name": "stable-adamw"}}),
        ("loss spike", "a lower β₂", {"optim": {"betas": [0.9, 0.9]}}),
    ],
)
def test_a_remedy_that_the_run_has_is_not_recommended_and_another_is(folder, kind, remedy, has):
    for config, known in (({"optim": {"eps": 1e-8}}, False), ({"optim": {"eps": 1e-8}} | has, True)):
        spoil(folder, kind)
        folder.config = {"config": config}
        (found,) = [finding for finding in folder.explain().findings if finding.kind == kind]
        assert (remedy in found.advice) != known
        assert "learning rate" in found.advice or kind == "eps"


def test_a_config_of_other_types_is_explained(folder):
    spoil(folder, "loss spike")
    optim = {"betas": [], "eps": "small", "clip_norm": [1], "weight_decay": None}
    folder.config = {"config": {"optim": optim, "steps": "many", "model": 3, "schedule": {"seqlen": {"start": "x"}}}}
    assert folder.only("loss spike").advice.startswith("StableAdamW")


def test_log_z_that_drifts_away_from_zero_is_found_and_towards_it_is_not(folder):
    folder.logz = np.linspace(5, 0, STEPS)
    assert not folder.explain()
    folder.logz = np.linspace(0, -40, STEPS)
    found = folder.only("logZ")
    assert found.step == 71  # 5 nats beyond the 1.95 of the first tenth
    assert "z-loss" in found.advice


def test_gradients_near_eps_are_found_but_not_those_of_tensors_without_any(folder):
    folder.grads["first.weight"][:] = 0
    assert not folder.explain()
    folder.grads["second.weight"] = np.geomspace(1e-3, 1e-9, STEPS)
    found = folder.only("eps")
    assert found.where == "second.weight"
    assert folder.grads["second.weight"][found.step - 1] == pytest.approx(1e-7, rel=0.05)
    assert "1e-15" in found.advice


def test_without_eps_in_the_config_there_is_no_finding_about_it(folder):
    folder.grads["second.weight"][:] = 1e-12
    folder.config = {}
    assert not folder.explain()


def test_a_nan_names_the_tensor_that_was_first_and_what_came_before(folder):
    folder.losses[300:] = np.nan
    folder.grads["second.weight"][298:] = np.nan
    folder.grads["first.weight"][300:] = np.nan
    folder.rms["first.weight"][295] = 7.0
    found = folder.explain().findings[0]
    assert (found.kind, found.step, found.where) == ("non-finite", 299, "second.weight")
    assert "the loss was not finite at 100 steps, first at 301" in found.what
    assert "first.weight had RMS_t 7.00 at step 296, 3 steps before" in str(found)


def test_an_alarm_about_a_value_that_is_not_finite_is_a_finding(folder):
    alarm = {
        "event": "alarm",
        "step": 50,
        "kind": "non-finite",
        "where": "head.weight",
        "signal": "grad",
        "value": None,
    }
    folder.events = [alarm]
    found = folder.only("non-finite")
    assert (found.step, found.where) == (50, "head.weight")
    assert "the loss stayed finite" in found.what


def test_skipped_steps_are_counted_with_their_reasons(folder):
    folder.events = [{"event": "skipped", "step": s, "reason": "the loss is not finite"} for s in (7, 8, 90)]
    found = folder.only("skips")
    assert found.what == "Skipped steps: 3, the first at step 7, the last at step 90."
    assert found.evidence == ["the loss is not finite"]


def test_steps_that_a_watcher_skipped_count_too_and_other_alarms_are_summed_up(folder):
    acted = {"event": "alarm", "step": 5, "kind": "action", "where": "w", "signal": "skip", "advice": "not taken"}
    folder.events = [acted, *({"event": "alarm", "step": s, "kind": "rms spike", "where": "w"} for s in (4, 60))]
    found = folder.only("skips")
    assert (found.step, found.evidence) == (5, ["not taken"])
    assert "3 alarms (2 rms spike, 1 action)" in folder.explain().summary


def test_output_logits_are_not_taken_for_those_of_attention(folder):
    folder.write()
    lines = [json.loads(line) for line in (folder.path / "signals.jsonl").read_text().splitlines()]
    for i, line in enumerate(lines):
        line["layers"][""] = {"logit_max": 2.0 * 1.03**i}
    (folder.path / "signals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert lines[-1]["layers"][""]["logit_max"] > 1e4
    assert not explain(folder.path)


def test_the_most_severe_comes_first_and_all_are_numbered(folder):
    folder.losses[299:] = np.nan
    folder.logz = np.linspace(0, 40, STEPS)
    found = folder.explain()
    assert [finding.kind for finding in found.findings] == ["non-finite", "loss spike", "logZ"]
    assert "\n\n3. log Z drifts" in str(found)


@pytest.mark.parametrize("name", ["losses", "logz"])
def test_a_run_of_nothing_but_nan_is_explained(folder, name):
    setattr(folder, name, np.full(STEPS, np.nan))
    for values in (*folder.rms.values(), *folder.grads.values(), *folder.logits.values()):
        values[:] = np.nan
    assert ("non-finite" in [finding.kind for finding in folder.explain().findings]) == (name == "losses")


def test_a_log_alone_is_enough(tmp_path):
    rows = [{"step": i + 1, "loss": 9.0 if i in (80, 81) else 2 + 0.01 * (i % 3), "rms_max": 1.0} for i in range(100)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = explain(tmp_path)
    assert [finding.step for finding in found.findings] == [81]
    assert "no signals.jsonl" in found.summary
    assert "not finished" in found.summary

"""The alarm rules: what raises an alarm and what does not; windows continue after a resume."""

import json
import math

import numpy as np
import pytest

from trimtab.watch.events import Alarm, Detector, Rules, advise

NOW = Rules(ignore=0)


def tensor(**values: float) -> dict[str, float]:
    usual = {"rms": 1.0, "grad_rms": 1e-2, "param_rms": 1.0, "update_rms": 1e-3, "ratio": 1e-3, "eps_share": 1e-6}
    return usual | values


def losses(detector: Detector, values: list[float], start: int = 1) -> list[Alarm]:
    return [alarm for i, x in enumerate(values) for alarm in detector.check_loss(start + i, x)]


def calm(count: int) -> list[float]:
    return [2.0 + 0.1 * (-1) ** i for i in range(count)]  # mean 2, deviation 0.1


def test_an_rms_spike_names_the_tensor_the_usual_range_and_what_helps():
    detector = Detector(NOW)
    for step in range(1, 31):
        assert detector.check_tensors(step, {"a": tensor(rms=1 + 0.1 * (-1) ** step), "b": tensor()}, {}) == []
    hints = {"a": {"betas": (0.9, 0.999), "eps": 1e-8}}
    (alarm,) = detector.check_tensors(31, {"a": tensor(rms=3.0), "b": tensor(rms=2.4)}, hints)
    assert (alarm.step, alarm.kind, alarm.where, alarm.value, alarm.also) == (31, "rms spike", "a", 3.0, ("b",))
    assert alarm.usual == pytest.approx((0.8, 1.2), abs=0.01)
    line = str(alarm)
    for part in ("step 31", "a and 1 more", "rms 3", "usually 0.8 to 1.2", "β₂ (now 0.999)", "StableAdamW"):
        assert part in line
    assert "\n" not in line


@pytest.mark.parametrize(("rms", "spikes"), [(2.29999, False), (2.3, True), (math.nan, False)])
def test_the_limit_of_rms_belongs_to_the_spike(rms, spikes):
    assert bool(Detector(NOW).check_tensors(1, {"a": tensor(rms=rms)}, {})) == spikes


def test_the_first_steps_are_ignored_and_no_more():
    detector = Detector(Rules(ignore=5))
    seen = [bool(detector.check_tensors(step, {"a": tensor(rms=9.0)}, {})) for step in range(1, 8)]
    assert seen == [False] * 5 + [True, False]


def test_events_closer_than_ten_steps_are_one():
    def alarmed(steps: list[int], every: int = 1) -> list[int]:
        detector = Detector(NOW, every)
        return [s for s in steps if detector.check_tensors(s, {"a": tensor(rms=5.0)}, {})]

    assert alarmed([1, 2, 11, 21, 31]) == [1]
    assert alarmed([1, 12, 22]) == [1, 12]
    assert alarmed([20, 40, 60], every=20) == [20]  # it was there at every look


def test_a_loss_spike_needs_two_deviations_and_is_dated_at_the_first():
    detector = Detector(NOW)
    assert losses(detector, calm(100)) == []
    assert losses(detector, [2.5], 101) == []
    assert losses(detector, calm(3), 102) == []
    (alarm,) = losses(detector, [2.6], 105)
    assert (alarm.kind, alarm.step, alarm.value) == ("loss spike", 101, 2.6)
    assert alarm.usual[1] < 2.6
    assert losses(detector, [3.0], 106) == []  # the same event
    assert losses(detector, calm(100), 107) == []
    assert losses(detector, [2.5, *calm(10), 2.5], 207) == []  # ten steps apart


@pytest.mark.parametrize(("loss", "found"), [(2.79, False), (2.81, True), (math.inf, False)])
def test_one_loss_far_above_the_last_is_a_loss_spike_at_once(loss, found):
    detector = Detector(Rules())  # also in the steps that other rules ignore
    assert losses(detector, [9.0 - 0.1 * i for i in range(70)] + calm(20)) == []
    alarms = [alarm for alarm in losses(detector, [loss, *calm(5)], 91) if alarm.kind == "loss spike"]
    assert [(alarm.step, alarm.value) for alarm in alarms] == ([(91, loss)] if found else [])
    assert all("check the batch of this step" in alarm.advice for alarm in alarms)


def test_two_bad_batches_are_two_alarms():
    found = losses(Detector(Rules()), [*calm(100), 9.0, *calm(24), 9.0])
    assert [alarm.step for alarm in found] == [101, 126]


def test_two_spikes_within_sixteen_steps_are_two_however_rarely_tensors_are_measured():
    found = losses(Detector(NOW, 16), [*calm(100), 2.6, 2.6, *calm(11), 2.7, 2.7])
    assert [alarm.step for alarm in found] == [101, 114]


@pytest.mark.parametrize("noise", ["normal", "laplace", "gumbel"])
def test_noise_starts_the_rule_of_one_loss_less_than_once_in_two_thousand_steps(noise):
    values = (3 + 0.2 * getattr(np.random.default_rng(0), noise)(size=20_000)).tolist()
    assert len(losses(Detector(Rules(ignore=0, deviating=10)), values)) < 10


def test_an_explosion_in_the_first_steps_names_the_loss_before_training_and_the_learning_rate():
    detector = Detector(Rules())
    alarms = [
        a for i, x in enumerate([6.15, 6.07, 9.6, 22.0, 25.2, 11.7]) for a in detector.check_loss(i + 1, x, {"lr": 1.0})
    ]
    assert [(alarm.kind, alarm.step, alarm.value) for alarm in alarms] == [("explosion", 4, 25.2)]
    assert "6.15 before training" in alarms[0].advice
    assert "Lower the learning rate (now 1)" in alarms[0].advice
    assert "warm up longer" in alarms[0].advice


def test_a_nan_in_the_first_steps_is_explained_by_the_learning_rate_and_one_in_the_middle_is_not():
    first, late = (losses(Detector(Rules(ignore=30)), [*calm(n), math.nan, math.nan]) for n in (3, 50))
    assert [alarm.kind for alarm in first] == ["non-finite", "explosion"]
    assert "lower the learning rate" in first[0].advice
    assert [alarm.kind for alarm in late] == ["non-finite", "loss spike"]
    assert "learning rate" not in late[0].advice


def test_small_first_losses_are_no_level():
    assert losses(Detector(Rules()), [0.2, 0.9, 1.1, 0.3, 1.1, 0.1] * 3) == []  # five times the first


def test_the_limit_of_a_loss_is_so_many_deviations_over_the_window():
    for loss, deviates in ((2.319, False), (2.321, True)):
        detector = Detector(Rules(ignore=0, deviating=1))
        losses(detector, calm(100))
        assert bool(losses(detector, [loss], 101)) == deviates
    loose = Detector(Rules(ignore=0, deviating=1, deviations=4.0))
    losses(loose, calm(100))
    assert losses(loose, [2.39], 101) == []


def test_a_constant_loss_does_not_deviate_from_itself():
    assert losses(Detector(Rules(ignore=0, deviating=1)), [1.5] * 200) == []


def test_the_window_forgets():
    detector = Detector(Rules(ignore=0, window=30, deviating=1))
    losses(detector, [100.0] * 50 + calm(30))
    assert len(detector.losses) == 30
    assert losses(detector, [3.0], 81)


def test_nan_enters_no_window_and_is_an_alarm_of_its_own():
    detector = Detector(NOW)
    losses(detector, calm(100))
    before = list(detector.losses)
    alarms = losses(detector, [math.nan, math.inf, -math.inf], 101)
    assert [alarm.kind for alarm in alarms] == ["non-finite", "loss spike"]
    assert detector.losses == before
    assert detector.best == 1.9
    assert json.loads(json.dumps(alarms[0].to_json(), allow_nan=False))["value"] is None


def test_non_finite_tensors_are_named_in_the_order_of_the_model():
    detector = Detector(Rules())
    found = {
        "a": tensor(),
        "b": tensor(grad_rms=math.inf, update_rms=math.nan, rms=math.nan),
        "c": tensor(grad_rms=math.nan),
    }
    alarms = detector.check_tensors(1, found, {})  # also in the steps that spikes ignore
    assert [(x.kind, x.signal, x.where, x.also) for x in alarms] == [
        ("non-finite", "grad_rms", "b", ("c",)),
        ("non-finite", "update_rms", "b", ()),
    ]
    assert "inf" in str(alarms[0])


def test_gradients_near_eps_are_found_and_those_that_are_zero_are_not():
    detector = Detector(Rules())
    shares = {"far": 1e-6, "near": 0.1, "gone": 0.6, "zero": 1.0}
    found = {n: tensor(eps_share=x, grad_rms=0.0 if n == "zero" else 1e-8 * (1 / x - 1)) for n, x in shares.items()}
    (alarm,) = detector.check_tensors(1, found, {"gone": {"eps": 1e-8}})
    assert (alarm.kind, alarm.where, alarm.also) == ("gradient near eps", "gone", ("near",))
    assert "now 1e-08" in alarm.advice


def test_attention_logits_near_the_critical_value():
    detector = Detector(Rules())
    assert detector.check_layers(1, {"a": {"logit_max": 999.0, "entropy": 1.0}}) == []
    (alarm,) = detector.check_layers(2, {"a": {"logit_max": 1000.0, "entropy": 1.0}})
    assert (alarm.kind, alarm.where) == ("attention logits", "a")
    assert "qk-norm" in alarm.advice
    assert detector.check_layers(2, {"c": {"logit_max": 101.0, "entropy": 0.6}}) == []
    (collapsed,) = detector.check_layers(2, {"c": {"logit_max": 101.0, "entropy": 0.4}})
    assert (collapsed.kind, collapsed.where) == ("attention logits", "c")
    (broken,) = detector.check_layers(3, {"b": {"out_rms": math.nan, "out_max": math.nan}})
    assert (broken.kind, broken.where) == ("non-finite", "b")


def test_logits_that_stay_high_are_one_event_at_every_look():
    detector = Detector(Rules(), 3, 40)
    looks = [
        bool(detector.check_layers(step, {"a": {"logit_max": 5e3, "entropy": 0.0}})) for step in (40, 80, 122, 300)
    ]
    assert looks == [True, False, False, True]


STABLE = {"clip_threshold": 1.0, "betas": (0.9, 0.9), "eps": 1e-15, "lr": 0.1}
STABLE |= {"qk_norm": True, "z_loss": True, "clipped": True}


@pytest.mark.parametrize(
    ("kind", "signal", "remedy"),
    [
        ("rms spike", "rms", "use StableAdamW"),
        ("rms spike", "rms", "lower β₂"),
        ("rms spike", "rms", "clip gradients,"),
        ("loss spike", "loss", "use StableAdamW"),
        ("loss spike", "one loss", "lower β₂"),
        ("gradient near eps", "grad_rms", "smaller eps"),
        ("attention logits", "logit_max", "use qk-norm"),
        ("drift", "logit_max", "Use qk-norm"),
        ("drift", "output logits", "Add a z-loss"),
        ("drift", "logz", "Add a z-loss"),
    ],
)
def test_what_the_run_has_is_not_advised_and_something_else_is(kind, signal, remedy):
    assert remedy in advise(kind, signal, {"betas": (0.9, 0.999), "eps": 1e-8, "qk_norm": False, "z_loss": False})
    other = advise(kind, signal, STABLE)
    assert remedy not in other
    assert "the learning rate (now 0.1)" in other or kind == "gradient near eps"


def drift(signal: str, value: "list[float]", window: int = 10) -> list[Alarm]:
    detector = Detector(Rules(ignore=0, window=window, fewest=1))
    return [a for step, x in enumerate(value, 1) for a in detector.check_drift(step, {("output", signal): x})]


def test_drift_is_one_way_and_far():
    slow = [0.02 * step for step in range(200)]  # 0.2 in a window of 10
    fast = [-0.1 * step for step in range(200)]
    wave = [10 * math.sin(step / 7) for step in range(200)]
    assert drift("logz", slow) == []
    assert drift("logz", wave) == []
    alarms = drift("logz", fast)
    assert alarms[0].step == 60  # six windows closed, five changes
    assert "z-loss" in alarms[0].advice
    assert drift("param_rms", [1.01**step for step in range(200)]) == []  # 1.6 in five windows
    (first, *_) = drift("param_rms", [1.02**step for step in range(200)])
    assert (first.kind, first.signal) == ("drift", "param_rms")
    assert drift("param_rms", [1.0 if step % 2 else math.nan for step in range(200)]) == []


def test_a_resume_continues_every_window_exactly():
    def see(detector: Detector, step: int) -> list[Alarm]:
        loss = 2 + 0.1 * math.sin(step) + (3.0 if step in (71, 74, 90) else 0)
        found = {"a": tensor(rms=1 + 0.01 * (step % 7) + (2 if step in (70, 76) else 0), grad_rms=1.0 / step)}
        alarms = detector.check_loss(step, loss if step != 65 else math.nan) + detector.check_tensors(step, found, {})
        return alarms + detector.check_drift(step, {("output", "logz"): 0.3 * step})

    rules = Rules(ignore=0, window=13, fewest=5)
    whole, first = Detector(rules), Detector(rules)
    expected = {step: see(whole, step) for step in range(1, 101)}
    for step in range(1, 74):
        see(first, step)
    second = Detector(rules)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert {step: see(second, step) for step in range(74, 101)} == {s: expected[s] for s in range(74, 101)}
    assert second.state_dict() == whole.state_dict()
    assert any(expected[s] for s in range(74, 101))


def test_a_state_is_a_copy():
    detector = Detector(NOW)
    losses(detector, calm(5))
    state = detector.state_dict()
    losses(detector, calm(5), 6)
    assert len(state["losses"]) == 5
    with pytest.raises(ValueError, match="not a detector state: missing losses"):
        detector.load_state_dict({})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"window": 0}, "window"),
        ({"fewest": 200}, "never fit"),
        ({"drift_factor": 0.5}, "above 1"),
        ({"gap": 0}, "gap"),
    ],
)
def test_invalid_rules_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        Rules(**wrong)

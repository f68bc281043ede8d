"""A study that takes too long, or too much memory, is scaled down by a rule or refused with what would fit."""

import re
from dataclasses import replace

import pytest

from trimtab.lab import budget
from trimtab.lab.budget import MIN_BATCH, MIN_CONTEXT, MINUTES, fit, seconds
from trimtab.lab.sizes import parse_sizes
from trimtab.lab.study import Study, default_study, quick_study
from trimtab.nn import ConfigError
from trimtab.recipes import RECIPES
from trimtab.train.config import to_json, with_values

OWN = "tests.lab.own_model:build"


def shape(study: Study) -> tuple[int, int]:
    return study.base.batch, study.base.model.context


# --- Time


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("gpt-lab", {"model.width": 128}),
        ("gpt-lab", {"model.depth": 6}),
        ("gpt-lab", {"batch": 32}),
        ("gpt-lab", {"model.context": 128}),
        ("gpt-lab", {"model.vocab": 50_257}),
        ("gpt-lab", {"eval_every": 10}),
        ("clip-tiny", {"model.patch_dropout": 0.0}),
        ("clip-tiny", {"model.text_depth": 4}),
        ("clip-tiny", {"model.vocab": 49_408}),
    ],
)
def test_what_makes_a_run_longer_makes_its_estimate_longer(recipe, changes):
    config = RECIPES[recipe]()
    assert seconds(with_values(config, changes)) > seconds(config)


def test_the_time_of_a_users_model_is_not_known():
    study = default_study(OWN)
    assert study.minutes is None
    assert fit(study, 1e-3) is study


# --- What fits


@pytest.mark.parametrize("study", [default_study(), quick_study(), default_study("gpt-tiny")])
def test_a_study_that_fits_is_not_changed(study):
    assert fit(study) is study


@pytest.mark.parametrize("recipe", ["gpt2-117m", "gpt2-1.5b", "clip-vit-b32", "clip-vit-h14"])
def test_a_large_recipe_is_scaled_down_until_it_fits_and_says_so(recipe):
    study = default_study(recipe)
    assert study.minutes > MINUTES
    small = fit(study)
    assert small.minutes <= MINUTES
    for new, old, least in zip(shape(small), shape(study), (MIN_BATCH, MIN_CONTEXT), strict=True):
        assert new >= least
        assert old / new in {2**i for i in range(13)}
    assert (small.sizes, small.lrs, small.arms, small.seeds) == (study.sizes, study.lrs, study.arms, study.seeds)
    said = re.findall(r"(batch|context) (\d+) -> (\d+)", small.question)
    wanted = zip(("batch", "context"), shape(study), shape(small), strict=True)
    assert said == [(name, str(old), str(new)) for name, old, new in wanted if old != new]
    assert small.question.startswith(study.question)
    assert Study.from_json(small.to_json()) == small  # saved with the study
    assert len(small.cells()) == len(study.cells())


def test_no_more_is_scaled_than_needed():
    study = default_study("gpt-small")
    half = fit(study, 60)
    assert shape(half) == (32, 128)
    assert shape(fit(study, half.minutes - 0.1)) == (16, 128)  # of two that are as far above their minimum, the batch
    assert fit(study, study.minutes) is study


def test_what_does_not_fit_is_refused_with_the_largest_family_that_does():
    study = replace(default_study("gpt2-117m"), sizes=parse_sizes("joint"))
    with pytest.raises(
        ConfigError, match=r"gpt2-117m: 70 runs with batch 16, context 64 take about .* h on two"
    ) as caught:
        fit(study)
    family = re.search(
        r"the limit is 90 min; try --sizes (joint:\d) \(\d+ min\), or --minutes (\d+)$", str(caught.value)
    )
    assert family is not None, caught.value
    fits = replace(study, sizes=parse_sizes(family[1]))
    assert fit(fits).minutes <= MINUTES
    larger = replace(study, sizes=parse_sizes(f"joint:{len(fits.sizes) + 1}"))
    with pytest.raises(ConfigError):
        fit(larger)
    assert shape(fit(study, float(family[2]))) == (MIN_BATCH, MIN_CONTEXT)
    with pytest.raises(ConfigError, match="try fewer --steps, --seeds or --lrs, or --minutes "):
        fit(study, 0.1)


def test_a_study_with_its_own_batch_is_refused_and_not_scaled():
    study = default_study("gpt-small")
    with pytest.raises(ConfigError, match="42 runs with batch 32, context 256 take about"):
        fit(study, 60, scale=False)


def test_memory_counts_for_all_runs_at_the_same_time(monkeypatch):
    study = default_study("gpt-small")
    needed = max(budget.estimate(cell.config).total for cell in study.cells())
    monkeypatch.setattr(budget, "device_memory", lambda device: 2 * needed)
    assert fit(study, 1e6, slots=2) is study
    assert shape(fit(study, 1e6, slots=3)) == (32, 128)
    monkeypatch.setattr(budget, "device_memory", lambda device: needed // 100)
    with pytest.raises(ConfigError, match=r"3 runs of 3x64 at the same time with batch 16, context 64 need at least"):
        fit(study, 1e6, slots=3)
    monkeypatch.setattr(budget, "device_memory", lambda device: None)
    assert fit(study, 1e6, slots=1000) is study


def test_the_same_command_gives_the_same_study():
    assert to_json(fit(default_study("gpt2-117m")).base) == to_json(fit(default_study("gpt2-117m")).base)

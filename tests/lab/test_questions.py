"""Questions: every study can be run, and every rule passes in the world of the papers and in no other."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.lab import int8_worlds, worlds_seqlen
from trimtab.analysis import fits, forecasts, measure
from trimtab.analysis.findings import Findings, Result
from trimtab.lab.questions import QUESTIONS, Question, find_question, list_questions
from trimtab.lab.questions.proxies.qk_norm import lead
from trimtab.lab.study import Cell, Study
from trimtab.nn import ConfigError
from trimtab.train.last_word import LastWords

FIRST = 6.0
OPTIMUM = 1e-2
EVERY = range(10, 501, 10)


def bowl(cell: Cell, *, depth: float = 2.0, steep: float = 0.1, optimum: float = OPTIMUM) -> float:
    """A loss that rises on both sides of the best learning rate."""
    return depth + steep * math.log10(cell.lr / optimum) ** 2 + 1e-3 * cell.seed


def shape(cell: Cell) -> tuple[int, int]:
    """Depth and width."""
    model = cell.config.model
    options = getattr(model, "options", None) or vars(model)
    return options["depth"], options["width"]


def params(cell: Cell) -> int:
    depth, width = shape(cell)
    return 12 * depth * width**2


def grows(to: float) -> tuple[tuple[int, float], ...]:
    return tuple((step, 5 * to ** (step / 500)) for step in EVERY)


def qk_norm(cell: Cell) -> dict:
    """The paper's: high rates fail without it, at lower ones the larger the model is."""
    limit = {"2x16": 0.2, "2x32": 0.2, "3x64": 0.05}[cell.size]
    broken = cell.arm == "plain" and cell.lr > limit
    losses = tuple((step, 2 + 2 / step + (step > 300) * broken * step / 500) for step in EVERY)
    logits = grows(1e4 if cell.arm == "plain" and cell.lr > 0.05 else 2)
    return {
        "loss": 3.5 if broken else bowl(cell, steep=0.02),
        "logits": logits,
        "lengths": logits,
        "cosines": tuple((step, 0.1) for step in EVERY),
        "losses": losses,
    }


def by_arm(**steepness: float):
    """Arms that differ by how steep they are; names have _ for spaces and hyphens."""
    keys = {key.strip("_"): value for key, value in steepness.items()}

    def world(cell: Cell) -> dict:
        name = "".join(letter if letter.isalnum() else "_" for letter in cell.arm)
        return {"loss": bowl(cell, steep=keys.get(name, 0.1))}

    return world


def z_loss(cell: Cell) -> dict:
    held = "z-loss" in cell.arm
    broken = 0.5 * (not held and "16" in cell.arm)
    end = 0.1 if held else 20.0 if "free" in cell.arm else 8.0
    return {"loss": 2.0 + broken, "logz": tuple((step, 6 + (end - 6) * step / 500) for step in EVERY)}


def warmup(cell: Cell) -> dict:
    steep = {"warmup 0.01": 0.3, "warmup 0.05": 0.2, "warmup 0.25": 0.1}[cell.arm]
    return {"loss": bowl(cell, steep=steep * {"2x16": 1, "2x32": 2, "3x64": 3}[cell.size], optimum=3e-2)}


def decay(cell: Cell) -> dict:
    return {"loss": bowl(cell, steep=0.2 if cell.arm == "coupled" else 0.1, optimum=3e-2)}


def decay_strength(cell: Cell) -> dict:
    return {"loss": bowl(cell, optimum={"a tenth": 3e-2, "usual": 0.1, "ten times": 0.3}[cell.arm])}


def width_depth(cell: Cell) -> dict:
    model = cell.config.model
    lowest = 1.9 if cell.size == "4x48" else 2.0
    return {"loss": bowl(cell, steep=0.05 * math.log2(model.width) + 0.1 * model.depth, depth=lowest)}


def mup(cell: Cell) -> dict:
    shift = 16 / cell.config.model.width if cell.arm == "standard" else 1.0
    return {"loss": bowl(cell, optimum=0.1 * shift, steep=0.3 if "muParam" in cell.arm else 0.1)}


def substitutes(cell: Cell) -> dict:
    held = cell.arm == "qk-norm"
    return {"loss": bowl(cell, steep=0.02 if held else 0.1), "logits": grows(2 if held or cell.lr < 0.1 else 1e3)}


def attention(cell: Cell) -> dict:
    return {"loss": bowl(cell), "logits": grows(1e3 if cell.lr > 0.05 else 1.5)}


def prediction(cell: Cell) -> dict:
    logit = 10 * cell.lr * params(cell) ** 0.7
    loss = 4.0 if logit > 3000 else 2.0 - 0.01 * math.log10(params(cell))  # nothing but the logit makes it fail
    return {"loss": loss, "logit_max": logit, "logits": grows(logit)}


def kappa(cell: Cell) -> dict:
    if cell.arm == "no layers":
        return {"loss": 2.6 + abs(math.log10(cell.lr / OPTIMUM))}
    harm = 0.25 * max(math.log10(float(cell.arm.split()[1])) - 1, 0)
    return {"loss": bowl(cell, depth=2 + harm)}


def eps(cell: Cell) -> dict:
    value = float(cell.arm.split()[1])
    r = 1e-2 * params(cell) ** -0.2 * cell.lr**-0.1
    sizes = {"grad_rms": r, "qkv_grad_rms": r, "delta_rms": r / (r + value), "eps": value}
    outs = tuple(cell.lr * (block + 1) for block in range(cell.config.model.depth))
    return {"loss": bowl(cell, depth=2 + value * 10), "outs": outs, **sizes}


def switchback(cell: Cell) -> dict:
    bad = cell.arm == "llm-int8"
    return {"loss": bowl(cell, depth=2.0 + 0.1 * bad), "words": LastWords(0.5 - 0.1 * bad, 0.0, 20.0, 256)}


def ablation(cell: Cell) -> dict:
    """The paper's: linear codes break nearly always, dynamic ones sometimes."""
    method = cell.arm.rpartition(", ")[0]
    losses = {"linear": 3.5, "dynamic": 2.1, "block-wise": 2.01, "Trimtab's default": 2.01}
    loss = losses.get(method.removesuffix(", stable embedding"), 2.0) - 0.1 * ("stable" in method)
    first_seed = cell.seed == 0 and "eps" in cell.arm
    broken = {"linear": cell.seed != 2, "linear, stable embedding": cell.seed == 0, "dynamic": first_seed}
    return {"loss": math.inf, "status": "stopped"} if broken.get(method) else {"loss": loss}


def adagrad(cell: Cell, lost: float = 0.0) -> dict:
    return {"loss": bowl(cell, depth=2.0 if cell.arm.startswith("AdamW") else 2.2 + lost * ("32" not in cell.arm))}


def embedding_parts(cell: Cell) -> dict:
    return {"loss": bowl(cell, depth=2 - {"none": 0, "all three": 0.2}.get(cell.arm, 0.1))}


def eight_bits_long(cell: Cell, drift: float = 0.0) -> dict:
    """Losses of all methods are equal, or published ones drift away."""
    drift *= cell.arm.startswith("published")
    points = tuple((step, 2 + 1000 / (step + 250) + drift * step) for step in range(0, 10_001, 500))
    return {"loss": points[-1][1], "evaluations": points, "steps": 10_000}


def worse(part: str, loss: float = 0.2):
    """Arms with this in their name have a higher loss."""
    return lambda cell: {"loss": bowl(cell, depth=2 + loss * (part in cell.arm))}


PAPERS = {
    **worlds_seqlen.PAPERS,
    **int8_worlds.PAPERS,
    "qk-norm": qk_norm,
    "z-loss": z_loss,
    "warmup": warmup,
    "decay": decay,
    "decay-strength": decay_strength,
    "width-depth": width_depth,
    "mup": mup,
    "substitutes": substitutes,
    "steps": by_arm(),
    "qk-norm-kind": lambda cell: {"loss": bowl(cell, depth=2.2 if cell.arm == "whole" else 2)},
    "batch": by_arm(),
    "attention": attention,
    "prediction": prediction,
    "kappa": kappa,
    "eps": eps,
    "eight-bits": by_arm(),
    "ablation": ablation,
    "eight-bits-clip": by_arm(),
    "eight-bits-classify": by_arm(),
    "eight-bits-long": eight_bits_long,
    "eight-bits-sensitivity": by_arm(),
    "adagrad": adagrad,
    "embedding-parts": embedding_parts,
    "switchback": switchback,
}
# Worlds in which the claim is wrong.
OTHERS = {
    **worlds_seqlen.OTHERS,
    **int8_worlds.OTHERS,
    "steps": by_arm(**{"500_steps": 0.1, "2000_steps": 0.2}),
    "batch": by_arm(batch_16=0.1, batch_64=0.2),
    "eight-bits": by_arm(**{"8_bits": 0.3}),
    "eight-bits-clip": worse("256"),
    "eight-bits-classify": worse("8 bits"),
    "eight-bits-long": lambda cell: eight_bits_long(cell, 1e-5),
    "eight-bits-sensitivity": worse("published, eps"),
    "adagrad": lambda cell: adagrad(cell, 0.1),
    "attention": lambda cell: {"loss": bowl(cell), "logits": grows(2)},
    "prediction": lambda cell: {"loss": bowl(cell), "logit_max": 10.0 if cell.size != "4x128" else 1e4},
    "width-depth": lambda cell: {"loss": bowl(cell, steep=0.1 * math.log2(cell.config.model.width))},
}


def findings_of(study: Study, world) -> Findings:
    results = []
    for cell in study.cells():
        depth, width = shape(cell)
        told = {"params": params(cell), "depth": depth, "width": width}
        names = {"name": cell.name, "study": study.name, "size": cell.size, "arm": cell.arm, "lr": cell.lr}
        made = Result(folder=Path(cell.folder), **names, seed=cell.seed, status="done", first=FIRST, kind="gpt", **told)
        told = {key: value for key, value in world(cell).items() if key not in READERS}
        results.append(replace(made, **told))
    curves = measure.curves_of(results)
    return Findings(
        studies=(),
        results=tuple(results),
        curves=tuple(curves),
        slopes=tuple(measure.slopes_of(curves)),
        fits=tuple(fits.fits_of(results)),
        critical=forecasts.critical_of(results, curves),
    )


READERS = ("analysis", "log", "classify", "words")  # of Evidence: what a world has instead of run folders


def readers_of(study: Study, world):
    """Functions of a run folder, as `trimtab.analysis.one_run.analyze`."""
    cells = {Path(cell.folder): cell for cell in study.cells()}
    return {name: lambda folder, name=name: world(cells[folder])[name] for name in READERS}


def answer(question: Question, world, study: Study | None = None):
    study = study or question.study()
    return question.answer(findings_of(study, world), **readers_of(study, world))


def reversed_arms(study: Study, world):
    """The same numbers, for the arms in the opposite order."""
    names = [arm.name for arm in study.arms]
    other = dict(zip(names, reversed(names), strict=True))
    return lambda cell: world(replace(cell, arm=other[cell.arm]))


STUDIES = [name for name, asked in QUESTIONS.items() if isinstance(asked, Question)]


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_can_be_run_and_takes_minutes(name):
    study = QUESTIONS[name].study()
    cells = study.cells()
    assert study.name == name
    assert len({cell.name for cell in cells}) == len(cells)
    assert len(study.seeds) >= 2
    assert 1 < QUESTIONS[name].minutes <= 15
    assert Study.from_json(study.to_json()) == study


@pytest.mark.parametrize("name", STUDIES)
def test_the_claims_pass_where_they_are_true(name):
    question = QUESTIONS[name]
    checks = answer(question, PAPERS[name])
    assert checks
    wrong = [check for check in checks if check.passed is not True]
    assert not wrong, wrong
    assert all(check.evidence for check in checks)


@pytest.mark.parametrize("name", STUDIES)
def test_some_claim_fails_where_they_are_not(name):
    question = QUESTIONS[name]
    study = question.study()
    world = OTHERS.get(name) or reversed_arms(study, PAPERS[name])
    assert False in [check.passed for check in answer(question, world)]


@pytest.mark.parametrize("name", STUDIES)
def test_without_runs_nothing_is_claimed(name):
    question = QUESTIONS[name]
    study = question.study()
    empty = findings_of(study, PAPERS[name])
    nothing = Findings(studies=(), results=(), critical=empty.critical)
    assert {check.passed for check in question.answer(nothing)} == {None}
    # Runs of another study are not evidence for this one.
    others = findings_of(replace(study, name="another"), PAPERS[name])
    assert {check.passed for check in question.answer(others)} == {None}


def test_both_kinds_of_decay_are_equal_at_the_learning_rate_of_the_recipe_and_below_one_everywhere():
    study = QUESTIONS["decay"].study()
    optims = {(cell.arm, cell.lr): cell.config.optim for cell in study.cells()}
    per_step = {key: o.weight_decay * (1 if o.independent_decay else o.lr) for key, o in optims.items()}
    assert per_step["coupled", study.base.optim.lr] == pytest.approx(per_step["independent", study.base.optim.lr])
    assert max(per_step.values()) <= 0.2 + 1e-9  # weights are forgotten in five steps at most


def test_an_unfinished_study_claims_nothing_about_what_is_missing():
    question = QUESTIONS["warmup"]
    whole = findings_of(question.study(), PAPERS["warmup"])
    results = [replace(r, status="missing") if (r.lr, r.arm) == (0.3, "warmup 0.01") else r for r in whole.results]
    part = replace(whole, results=tuple(results), curves=tuple(measure.curves_of(results)))
    assert {check.passed for check in question.answer(part)} == {None}
    assert "warmup 0.01" in question.answer(part)[0].evidence


def test_a_broken_run_counts_as_no_training():
    question = QUESTIONS["z-loss"]

    def world(cell: Cell) -> dict:
        broken = {"status": "stopped", "loss": math.inf} if cell.arm == "free, 16 bits" else {}
        return z_loss(cell) | broken

    assert question.answer(findings_of(question.study(), world))[3].passed is True


def without_effect(cell: Cell) -> dict:
    return warmup(replace(cell, arm="warmup 0.01"))


def with_transient(cell: Cell) -> dict:
    return z_loss(cell) | {"planned": 500, "logz": tuple((step, 30.0 if step < 50 else 6.0) for step in EVERY)}


def by_size(cell: Cell) -> dict:
    return eps(cell) | {"outs": tuple(cell.config.model.width * out for out in eps(cell)["outs"])}


def as_the_smaller(cell: Cell) -> dict:
    """The learning rate alone decides, so that the next smaller size says as much as a forecast."""
    logit = 1e5 * cell.lr * params(cell) ** 0.01
    loss = 4.0 if cell.lr > 0.05 else 2.0 - 0.01 * math.log10(params(cell))
    return {"loss": loss, "logit_max": logit, "logits": grows(logit)}


def stable_dynamic(cell: Cell) -> dict:
    return ablation(cell) if "dynamic" not in cell.arm else {"loss": 2.0}


@pytest.mark.parametrize(
    ("name", "claim", "world"),
    [
        ("warmup", "the longest warmup has the edge of stability at a higher learning rate", without_effect),
        ("z-loss", "without z-loss log Z drifts", with_transient),
        ("eps", "the outputs of a block differ between the sizes by at most", by_size),
        ("prediction", "more are right than if each did what the next smaller one does", as_the_smaller),
        ("ablation", "dynamic: with the stable embedding fewer runs are unstable", stable_dynamic),
    ],
)
def test_a_claim_fails_where_there_is_no_effect(name, claim, world):
    question = QUESTIONS[name]
    checks = [check for check in question.answer(findings_of(question.study(), world)) if claim in check.claim]
    assert checks
    assert {check.passed for check in checks} == {False}


def test_logitslead_only_if_they_grow_before_the_loss_rises():
    losses = tuple((step, 2.0 + (step > 300)) for step in EVERY)
    assert lead(grows(1e4), losses) > 0
    assert lead(tuple((step, 5.0 if step < 450 else 500.0) for step in EVERY), losses) < 0
    assert lead(grows(2), losses) is None
    assert lead(grows(1e4), tuple((step, 2.0) for step in EVERY)) is None


def test_questions_are_found_by_name():
    assert find_question("qk_norm") is QUESTIONS["qk-norm"]
    with pytest.raises(ConfigError, match="Did you mean 'warmup'"):
        find_question("warmpu")
    rows = list_questions()
    assert [row[0] for row in rows] == list(QUESTIONS)
    assert all(isinstance(question, str) and minutes > 0 for _, question, minutes in rows)

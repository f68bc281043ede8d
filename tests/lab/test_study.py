"""Studies: every config is built before anything runs, names become safe folders, JSON and TOML say what they mean."""

import json
import string
from dataclasses import replace
from itertools import pairwise
from pathlib import PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.lab.sizes import Size, parse_size
from trimtab.lab.study import LRS, Arm, Study, default_study, lr_grid, number, quick_study, slug, slugs
from trimtab.lab.study_file import make_study, read_study
from trimtab.lab.subjects import open_subject
from trimtab.nn import ConfigError
from trimtab.train.config import differences

HOSTILE = [
    "<script>alert(1)</script>",
    "../x",
    "/etc",
    "..",
    ".",
    "a/b",
    "a\\b",
    "x" * 300,
    "é",
    "a\nb",
    "con:",
    '"',
    "a b",
    "a_b",
    "A_B",
]


def small(**changes) -> Study:
    study = Study(
        name="small",
        question="?",
        subject="gpt-lab",
        base=open_subject("gpt-lab"),
        sizes=(parse_size("2x16"), parse_size("2x32")),
        lrs=(1e-3, 1e-2),
        arms=(Arm("plain"), Arm("steadied", ("qk-norm", "z-loss"))),
        seeds=(0, 1),
    )
    return replace(study, **changes)


# --- The grid


def test_the_grid_has_every_combination_once():
    cells = small().cells()
    assert len(cells) == len({cell.name for cell in cells}) == 16
    assert cells[0].name == "2x16/plain/lr-0.001/seed-0"
    assert cells[0].folder.as_posix() == "cells/2x16/plain/lr-0.001/seed-0"


def test_a_cell_is_the_base_at_its_place_of_the_grid():
    cell = next(c for c in small().cells() if c.name == "2x32/steadied/lr-0.01/seed-1")
    changed = {
        name for name, _, _ in differences(open_subject("gpt-lab"), replace(cell.config, optim=small().base.optim))
    }
    assert changed == {"model.depth", "model.width", "model.heads", "model.qk_norm", "model.z_loss", "seed"}
    assert (cell.config.optim.lr, cell.config.seed) == (0.01, 1)


def test_two_arms_differ_by_their_switches_alone():
    plain, steadied = (
        cell.config for cell in default_study().cells() if (cell.lr, cell.seed, cell.size) == (0.1, 0, "3x64")
    )
    assert {name for name, _, _ in differences(plain, steadied)} == {"model.qk_norm", "model.z_loss"}


def test_the_default_study_is_the_paper_made_small():
    study = default_study()
    assert [size.name for size in study.sizes] == ["2x16", "2x32", "3x64"]
    assert study.lrs == LRS
    assert len(LRS) == 7
    assert LRS[-1] / LRS[0] == pytest.approx(1000)
    assert [arm.name for arm in study.arms] == ["plain", "steadied"]
    assert len(study.cells()) == 42
    assert study.minutes is not None
    assert study.minutes < 10
    quick = quick_study()
    assert quick.minutes is not None
    assert quick.minutes < 2.5
    assert len(quick.sizes) >= 3  # fewer are not enough for a fit and its back-test


@pytest.mark.parametrize(
    ("subject", "first", "peak", "last"),
    [
        ("gpt-lab", 1e-3, 3e-2, 1.0),
        ("gpt-tiny", 1e-4, 3e-3, 1e-1),
        ("gpt2-117m", 1.8e-5, 6e-4, 1.8e-2),
        ("clip-tiny", 6.67e-5, 2e-3, 6.67e-2),
        ("tests.lab.own_model:build", 3e-5, 1e-3, 3e-2),
    ],
)
def test_the_grid_is_three_decades_around_the_learning_rate_of_the_recipe(subject, first, peak, last):
    assert open_subject(subject).optim.lr == peak
    for study in (default_study(subject), quick_study(subject), make_study({"subject": subject, "steps": 400})):
        assert len(study.lrs) == 7
        assert (study.lrs[0], study.lrs[3], study.lrs[6]) == (first, peak, last)
        assert [b / a for a, b in pairwise(study.lrs)] == pytest.approx([3.33, 3, 3.33] * 2, abs=0.35)


@given(st.floats(min_value=1e-8, max_value=1e2))
def test_any_learning_rate_is_in_the_middle_of_its_grid(peak):
    lrs = lr_grid(peak)
    assert (lrs[3], sorted({*lrs})) == (peak, [*lrs])
    assert lrs[-1] / lrs[0] == pytest.approx(1000, rel=0.01)


@pytest.mark.parametrize(("recipe", "switches"), [("gpt-tiny", ("warmup=0.25",)), ("clip-tiny", ("qk-norm",))])
def test_another_recipe_gets_what_it_lacks(recipe, switches):
    study = default_study(recipe)
    assert study.arms == (Arm("as it is"), Arm("steadied", switches))
    assert len(study.cells()) == 42


def test_mup_starts_from_the_smallest_width_of_the_study():
    cells = small(arms=(Arm("mup", ("mup",)),)).cells()
    assert {cell.config.model.mup_base_width for cell in cells} == {16}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sizes": ()}, "no sizes"),
        ({"lrs": ()}, "no lrs"),
        ({"arms": ()}, "no arms"),
        ({"seeds": ()}, "no seeds"),
        ({"lrs": (1e-3, 0.0)}, "0.0 is not a learning rate"),
        ({"lrs": (-1.0,)}, "not a learning rate"),
        ({"lrs": (float("nan"),)}, "not a learning rate"),
        ({"lrs": (float("inf"),)}, "not a learning rate"),
        ({"lrs": ("fast",)}, "not a learning rate"),
        ({"lrs": (1e-3, 0.001)}, "given twice"),
        ({"seeds": (0, 0)}, "given twice"),
        ({"seeds": (-1,)}, "not a seed"),
        ({"seeds": (True,)}, "not a seed"),
        ({"arms": (Arm("a"), Arm("a", ("qk-norm",)))}, "'a' is given twice"),
        ({"arms": (Arm(" "),)}, "not a name"),
        ({"sizes": (parse_size("2x16"), Size("2x16", 3, 16, 1))}, "given twice"),
    ],
)
def test_an_impossible_grid_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        small(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arms": (Arm("both", ("kappa=10", "qk-norm")),)}, "cell 2x16/both: kappa=10"),
        ({"arms": (Arm("odd", ("qk-nrom",)),)}, "cell 2x16/odd: .*Did you mean 'qk-norm'"),
        ({"sizes": (Size("2x15", 2, 15, 1),)}, "cell 2x15/plain: .*rotary"),
        ({"base": replace(open_subject("gpt-lab"), steps=10)}, "cell 2x16/plain: .*ends before"),
    ],
)
def test_a_config_that_cannot_be_is_refused_with_its_cell(changes, words):
    with pytest.raises(ConfigError, match=words):
        small(**changes).cells()


# --- Names


def test_hostile_names_become_safe_and_different_folders_and_stay_names():
    study = small(arms=tuple(Arm(name) for name in HOSTILE))
    cells = study.cells()
    assert {cell.arm for cell in cells} == set(HOSTILE)
    folders = {cell.arm: PurePosixPath(cell.folder.as_posix()).parts[2] for cell in cells}
    assert len({folder.lower() for folder in folders.values()}) == len(HOSTILE)
    assert folders["a_b"].startswith("a_b")
    for folder in folders.values():
        assert set(folder) <= set(string.ascii_letters + string.digits + "_.=+,-")
        assert folder[0] not in ".-"
        assert len(folder) < 80


@given(st.lists(st.text(min_size=1), unique=True, max_size=6))
def test_any_names_become_different_folders(names):
    found = slugs(names)
    assert len({folder.lower() for folder in found.values()}) == len(names)
    assert all(folder and "/" not in folder and folder.strip(".") for folder in found.values())


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_a_learning_rate_in_a_name_is_that_learning_rate(lr):
    assert float(number(lr)) == lr


def test_an_ordinary_name_is_its_own_folder():
    assert [slug(name) for name in ("plain", "z-loss=1e-4", "as it is")] == ["plain", "z-loss=1e-4", "as_it_is"]


# --- JSON

names = st.text(min_size=1, max_size=12).filter(str.strip)
arms = st.lists(
    st.tuples(names, st.lists(st.sampled_from(["qk-norm", "z-loss=1e-3", "eps=1e-6", "8-bit=dynamic:64"]), max_size=3)),
    min_size=1,
    max_size=3,
    unique_by=lambda pair: pair[0],
)


@settings(max_examples=25, deadline=None)
@given(
    name=names,
    sizes=st.lists(st.sampled_from(["1x16", "2x32", "3x48x6"]), min_size=1, max_size=3, unique=True),
    lrs=st.lists(st.floats(min_value=1e-12, max_value=10), min_size=1, max_size=3, unique=True),
    arms=arms,
    seeds=st.lists(st.integers(min_value=0, max_value=2**31), min_size=1, max_size=3, unique=True),
)
def test_a_study_goes_to_json_and_comes_back(name, sizes, lrs, arms, seeds):
    study = small(
        name=name,
        sizes=tuple(parse_size(size) for size in sizes),
        lrs=tuple(lrs),
        arms=tuple(Arm(arm, tuple(switches)) for arm, switches in arms),
        seeds=tuple(seeds),
    )
    data = json.loads(json.dumps(study.to_json()))
    again = Study.from_json(data)
    assert again == study
    assert again.cells() == study.cells()
    assert [cell["folder"] for cell in data["cells"]] == [cell.folder.as_posix() for cell in study.cells()]


@pytest.mark.parametrize("data", [{}, {"name": "x"}, {**small().to_json(), "sizes": [{"nome": 1}]}])
def test_what_is_no_study_is_refused(data):
    with pytest.raises(ConfigError, match="not a saved study"):
        Study.from_json(data)


# --- TOML

FILE = """
name = "wide"
question = "Does it need qk-norm?"
sizes = ["2x16", "width:2"]
lrs = [1e-3, 1]
seeds = 3
steps = 100

[arms]
plain = []
"<script>" = ["qk-norm", "z-loss=1e-3"]
one = "clip=0.5"

[set]
batch = 8
"optim.betas" = [0.9, 0.999]
optim.eps = 1e-6
"""


def test_a_study_is_read_from_a_file(tmp_path):
    (tmp_path / "mine.toml").write_text(FILE)
    study = read_study(tmp_path / "mine.toml")
    assert (study.name, study.question) == ("wide", "Does it need qk-norm?")
    assert [size.name for size in study.sizes] == ["2x16", "3x16", "3x32"]
    assert (study.lrs, study.seeds) == ((1e-3, 1), (0, 1, 2))
    assert [arm.switches for arm in study.arms] == [(), ("qk-norm", "z-loss=1e-3"), ("clip=0.5",)]
    config = study.cells()[0].config
    assert (config.steps, config.batch, config.batch_warmup.end) == (100, 8, 8)
    assert (config.optim.betas, config.optim.eps) == ((0.9, 0.999), 1e-6)


def test_an_empty_file_is_the_default_study(tmp_path):
    (tmp_path / "mine.toml").write_text("")
    assert replace(read_study(tmp_path / "mine.toml"), name="default") == default_study()


def test_a_file_may_study_a_model_of_ones_own():
    study = make_study(
        {"subject": "tests.lab.own_model:build", "sizes": [{"name": "small", "width": 4}, {"width": 8, "depth": 2}]}
    )
    assert [size.name for size in study.sizes] == ["small", "width=8,depth=2"]
    assert study.arms[1] == Arm("steadied", ("stable-adamw", "warmup=0.25"))
    assert study.cells()[0].config.model.options == {"width": 4}
    assert study.minutes is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr = [1e-3]", "'lr' is not a key of a study. Did you mean 'lrs'"),
        ("lrs = 1e-3", r"lrs=0.001: expected `list`, got `float`; try lrs = \[0.001, 0.01\]"),
        ("lrs = []", "no lrs"),
        ("sizes = 'tall'", "neither depth x width nor a ladder"),
        ("sizes = [3]", r"expected `str . table`, got `int` - at `sizes\[0\]`; try sizes = "),
        ("sizes = [{name = 'a'}]", "has no options"),
        ("sizes = [{hidden = 3}]", "only module:function"),
        ("seeds = 0", r"seeds=0 is too small or empty; try seeds = 2, or seeds = \[0, 1\]"),
        ("seeds = -1", "no seeds"),
        ("seeds = 'two'", "expected `int . list`, got `str`; try seeds = 2"),
        ("seeds = true", "expected `int . list`, got `bool`"),
        ("steps = 'many'", "steps='many': expected `int`, got `str`; try steps = 500"),
        ("steps = 0", "too small"),
        ("subject = 'gpt-lba'", "Did you mean 'gpt-lab'"),
        ("subject = 3", 'expected `str`, got `int`; try subject = "gpt-lab"'),
        ("name = ' '", 'empty; try name = "wide"'),
        ("arms = 3", r"expected `table`, got `int`; try \[arms\]"),
        ("[arms]", "no arms"),
        (
            "[arms]\na = 3",
            r"expected `str . list`, got `int` - at `arms\[...\]`; try \[arms\] and below it: steadied = ",
        ),
        ("[arms]\na = ['zloss']", "Did you mean 'z-loss'"),
        ("[set]\noptim.lr = 1", "use 'lrs' instead"),
        ("[set]\n'model.width' = 1", "use 'sizes' instead"),
        ("[set]\n'optim.learning_rate' = 1", "Did you mean 'optim.lr'"),
        ("set = 1", r"expected `table`, got `int`; try \[set\]"),
        ("name = ", "is not TOML"),
    ],
)
def test_a_slip_in_a_file_is_refused_in_words(tmp_path, text, words):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_study(path)
    assert str(caught.value).startswith(str(path))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_study(tmp_path / "none.toml")

"""Code that a folder or a file names is not run, and not even imported, without consent."""

import json
import os
from pathlib import Path

import pytest

from tests.test_faults import call
from tests.train.runs import quiet, tiny
from trimtab.lab import read_study
from trimtab.lab.study import Study
from trimtab.runs import RunError, RunFolder, replace_json, require_json
from trimtab.train import evaluate, load_run, resume, sample, train
from trimtab.train.config import ConfigError

HARM = "import os\nos.mkdir('harm')\n\n\ndef build(**options):\n    os.mkdir('more harm')\n"


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose config names code in the current folder; importing that code is visible."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(HARM)
    folder = RunFolder(tmp_path / "run")
    train(tiny(tmp_path, steps=2), folder.path, console=quiet())
    data = require_json(folder.config)
    data["config"] |= {"kind": "module", "model": {"build": "evil:build", "options": {}, "context": 32}}
    replace_json(folder.config, data)  # with a checksum that is right: it is no signature
    folder.result.unlink()
    return folder.path


@pytest.mark.parametrize("use", [resume, evaluate, sample, load_run])
def test_a_folder_that_names_code_is_refused(planted, tmp_path, use):
    with pytest.raises(RunError, match=r"was trained with the code evil:build.*add --trust evil:build"):
        use(planted)
    with pytest.raises(RunError, match="--trust evil:build"):
        use(planted, trust="other:build")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("build", ["os:system", "evil:build", "subprocess:run", "\x1b[31m:x"])
@pytest.mark.parametrize("command", ["resume", "eval", "sample"])
def test_the_command_line_asks_for_consent(planted, tmp_path, command, build):
    config = planted / "config.json"
    data = require_json(config)
    data["config"]["model"]["build"] = build
    replace_json(config, data)
    done = call(command, str(planted))
    assert done.code == 2
    assert "if you trust it, add --trust" in done.err
    assert "\x1b" not in done.err
    assert not (tmp_path / "harm").exists()


def test_with_consent_the_code_runs(planted, tmp_path):
    assert call("eval", str(planted), "--trust", "evil:build").code == 2  # it returns no model
    assert (tmp_path / "more harm").exists()


@pytest.mark.parametrize("words", [("report", "--out", "page.html"), ("predict", "--params", "1e6"), ("explain",)])
def test_readers_never_import_it(planted, tmp_path, words):
    done = call(words[0], str(planted), *words[1:])
    assert done.code == 0, done.err
    assert not (tmp_path / "harm").exists()


def test_a_study_file_that_names_code_needs_consent(planted, tmp_path):
    (tmp_path / "mine.toml").write_text('subject = "evil:build"\n')
    with pytest.raises(ConfigError, match=r"its subject evil:build is code .* --trust evil:build"):
        read_study("mine.toml")
    assert call("lab", "--config", "mine.toml").code == 2
    (tmp_path / "other.toml").write_text('subject = "gpt-lab"\n[set]\n"model.build" = "evil:build"\n')
    assert call("lab", "--config", "other.toml", "--trust", "evil:build").code == 2
    assert not (tmp_path / "harm").exists()


def test_a_study_folder_that_names_code_is_compared_without_importing_it(planted, tmp_path):
    from trimtab.lab.study import quick_study

    out = tmp_path / "out"
    out.mkdir()
    data = quick_study().to_json() | {"subject": "evil:build", "base": require_json(planted / "config.json")["config"]}
    assert isinstance(Study.from_json(data), Study)
    (out / "study.json").write_text(json.dumps(data))
    done = call("lab", "--quick", "--out", str(out))
    assert done.code == 2
    assert "holds another study" in done.err
    for words in (("report", str(out), "--out", "page.html"), ("predict", str(out), "--params", "1e6")):
        assert "Traceback" not in call(*words).err
    assert not (tmp_path / "harm").exists()
    assert os.listdir(out) == ["study.json"]

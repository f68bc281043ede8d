"""TensorBoard: the numbers of the log; a resume removes later ones."""

import builtins
import sys

import pytest

from tests.train.runs import quiet, read_events, read_log, tiny
from trimtab.train import resume, train


def scalars(run, tag):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_without_the_package_the_extra_is_named_and_nothing_written(tmp_path, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] == "tensorboard":
            raise ImportError("No module named 'tensorboard'")
        return real(name, *args, **kwargs)

    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"tensorboard=True needs the package.*pip install 'trimtab\[tensorboard\]'"):
        train(tiny(tmp_path, tensorboard=True), tmp_path / "run", console=quiet())
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_its_scalars_are_those_of_the_log(tmp_path):
    pytest.importorskip("tensorboard")
    run = tmp_path / "run"
    train(tiny(tmp_path, tensorboard=True), run, console=quiet())
    resume(run, step=4, console=quiet())
    log = [(line["step"], pytest.approx(line["loss"])) for line in read_log(run)]
    assert scalars(run, "train/loss") == log
    assert dict(scalars(run, "validation/loss")) == {
        event["step"]: pytest.approx(event["loss"]) for event in read_events(run, "evaluated")
    }

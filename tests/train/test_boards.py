"""W&B and MLflow without a server: the numbers of the log; a resume continues the same run."""

import json
import sys

import pytest

from tests.train.runs import quiet, read_events, read_log, tiny
from trimtab.hints import MissingExtra
from trimtab.train import boards, resume, train
from trimtab.train.boards import WandB

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def test_mlflow_gets_the_numbers_of_the_log(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlflow'}")
    from mlflow import MlflowClient

    run = tmp_path / "run"
    train(tiny(tmp_path, mlflow=True), run, console=quiet())
    resume(run, step=4, console=quiet())
    client = MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("trimtab").experiment_id])
    assert found.info.run_name == "run"
    assert found.info.status == "FINISHED"
    assert float(found.data.params["optim.lr"]) > 0
    history = {m.step: m.value for m in client.get_metric_history(found.info.run_id, "train/loss")}
    assert history == {line["step"]: pytest.approx(line["loss"]) for line in read_log(run)}
    checked = {m.step: m.value for m in client.get_metric_history(found.info.run_id, "validation/loss")}
    assert checked == {event["step"]: pytest.approx(event["loss"]) for event in read_events(run, "evaluated")}


def test_wandb_gets_the_numbers_of_the_log(tmp_path, monkeypatch):
    """Offline: W&B writes its own file. What it is given is recorded on the way."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    given, write = [], WandB.write
    monkeypatch.setattr(
        WandB, "write", lambda self, values, step: (given.append((step, values)), write(self, values, step))
    )
    run = tmp_path / "run"
    train(tiny(tmp_path, wandb=True), run, console=quiet())
    losses = [(step, values["train/loss"]) for step, values in given if "train/loss" in values]
    assert losses == [(line["step"], pytest.approx(line["loss"])) for line in read_log(run)]
    (log,) = (run / "wandb").glob("offline-run-*/*.wandb")
    assert boards.identify(run.resolve()) in log.name
    assert b"train/loss" in log.read_bytes()


def test_a_missing_package_is_named_and_a_failing_one_does_not_stop_the_run(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError("the server does not answer")

    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr(WandB, "write", refuse)
    with pytest.warns(UserWarning, match="wandb gets no more scalars.*does not answer"):
        train(tiny(tmp_path, wandb=True), tmp_path / "run", console=quiet())
    assert json.loads((tmp_path / "run" / "result.json").read_text())["why"] == "done"
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingExtra, match=r"pip install 'trimtab\[mlflow\]'"):
        train(tiny(tmp_path, mlflow=True), tmp_path / "other", console=quiet())

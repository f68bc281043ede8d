"""Checkpoints: complete or absent, verified before they are loaded, never unpickled."""

import contextlib
import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.conftest import assert_same, seed
from tests.train.runs import BATCH, hashes, quiet, read_events, read_log, tiny
from trimtab.optim import AdamW
from trimtab.runs import files as files_module
from trimtab.runs.files import require_json, seal, sha256_of
from trimtab.train import CheckpointError, Checkpoints, RunError, evaluate, load_run, resume, train
from trimtab.train.processes import Processes
from trimtab.train.tensors import write_tensors

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run with checkpoints of steps 4, 8 and 12; copy it before changing it."""
    folder = tmp_path_factory.mktemp("finished")
    train(tiny(folder), folder / "run", console=quiet())
    return folder / "run"


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def unfinished(run) -> Path:
    """The run as if it had been killed just before its result was written."""
    (run / "result.json").unlink()
    return run


def made(width: int = 48) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 100), nn.Linear(100, 3, bias=False))
    optimizer = AdamW(model.named_parameters(), lr=1e-2, bits=8)
    for _ in range(3):
        model(torch.randn(4, width, generator=seed(0))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def saved(folder: Path, *steps: int, keep: int = 10, losses: dict[int, float] | None = None) -> Checkpoints:
    checkpoints, (model, optimizer) = Checkpoints(folder, keep, Processes()), made()
    for step in steps:
        loss = (losses or {}).get(step, float("nan"))
        checkpoints.save(step, model, optimizer, {"note": step}, validation_loss=loss)
    return checkpoints


# --- Files


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool])
def test_tensors_come_back_bit_for_bit(tmp_path, dtype):
    tensors = {
        "odd": torch.randn(7, 3, generator=seed(0)).to(dtype),
        "empty": torch.zeros(0, 4, dtype=dtype),
        "scalar": torch.ones((), dtype=dtype),
        "transposed": torch.randn(5, 2, generator=seed(1)).to(dtype).t(),
    }
    entry = write_tensors(tmp_path / "x.safetensors", tensors)
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, x in tensors.items():
        assert_same(read[name], x)
    assert entry == {
        "sha256": sha256_of(tmp_path / "x.safetensors"),
        "bytes": (tmp_path / "x.safetensors").stat().st_size,
    }


def test_large_tensors_are_hashed_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "_PIECE", 1000)
    x = torch.randn(12_345, generator=seed(0))
    entry = write_tensors(tmp_path / "x.safetensors", {"x": x})
    assert entry["sha256"] == hashlib.sha256((tmp_path / "x.safetensors").read_bytes()).hexdigest()
    assert_same(load_file(tmp_path / "x.safetensors")["x"], x)


# --- Saving and loading


def test_model_and_optimizer_come_back_exactly(tmp_path):
    checkpoints = saved(tmp_path, 3)
    model, _ = made()
    with torch.no_grad():
        model[0].weight.zero_()
    fresh = AdamW(model.named_parameters(), lr=1.0, bits=8)
    assert checkpoints.load(3, model, fresh)["note"] == 3
    expected, expected_optimizer = made()
    for name, x in model.state_dict().items():
        assert_same(x, expected.state_dict()[name])
    assert fresh.state_dict()["param_groups"] == expected_optimizer.state_dict()["param_groups"]
    for place, entry in expected_optimizer.state_dict()["state"].items():
        for key, x in entry.items():
            assert_same(fresh.state_dict()["state"][place][key], x)


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    checkpoints = saved(tmp_path, 1, 2, 3, 4, 5, keep=2, losses={1: 3.0, 2: 1.0, 3: 2.0, 4: 1.5})
    assert checkpoints.list_steps() == [2, 4, 5]
    assert checkpoints.best == 2
    assert {path.name for path in tmp_path.iterdir()} == {f"step-{n:08d}" for n in (2, 4, 5)}


def test_a_lower_loss_replaces_the_best(tmp_path):
    checkpoints = saved(tmp_path, 1, 2, 3, keep=1, losses={1: 3.0, 2: 1.0, 3: 0.5})
    assert checkpoints.best == 3
    assert checkpoints.list_steps() == [3]


def test_the_best_of_an_earlier_version_is_read_from_its_own_file(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    for step in (1, 2):
        manifest = checkpoints.path(step) / "manifest.json"
        data = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({k: x for k, x in data.items() if k not in ("validation_loss", "checksum")}))
    (tmp_path / "best.json").write_text("{")
    assert checkpoints.best is None
    (tmp_path / "best.json").write_text('{"step": 1, "validation_loss": 2.0}')
    assert checkpoints.best == 1


def test_a_loss_that_is_measured_later_is_added_to_the_checkpoint(tmp_path):
    checkpoints = saved(tmp_path, 1, 2, losses={1: 1.0})
    checkpoints.set_loss(2, 0.5)
    assert checkpoints.best == 2
    checkpoints.verify(2)


def test_a_renamed_checkpoint_does_not_count(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    checkpoints.path(2).rename(checkpoints.path(7))
    assert checkpoints.list_steps() == [1]
    with pytest.raises(CheckpointError, match=r"is of step 2: the folder was renamed; step 1 can be used instead"):
        checkpoints.verify(7)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    checkpoints = saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"0\.weight has shape \(100, 48\) in the checkpoint, \(100, 40\) here"):
        checkpoints.load(1, made(40)[0], None)
    with pytest.raises(CheckpointError, match=r"has 1\.weight, which the model does not have"):
        checkpoints.load(1, nn.Sequential(nn.Linear(48, 100)), None)
    with pytest.raises(CheckpointError, match=r"lacks 2\.bias"):
        checkpoints.load(1, nn.Sequential(*made()[0], nn.Linear(3, 3)), None)


def test_another_format_is_refused(tmp_path):
    checkpoints = saved(tmp_path, 1)
    manifest = checkpoints.path(1) / "manifest.json"
    manifest.write_text(json.dumps(seal(require_json(manifest) | {"format": 99})))
    with pytest.raises(CheckpointError, match="has format 99, this version reads 1"):
        checkpoints.verify(1)


@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint_gets_its_name_after_everything_is_written(tmp_path, monkeypatch, name):
    checkpoints = saved(tmp_path, 1)
    real = files_module.HashedWriter.__exit__

    def fail(self, *error):
        real(self, *error)
        if self.path.name == name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(files_module.HashedWriter, "__exit__", fail)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.save(2, *made(), {})
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001"}
    checkpoints.verify(1)


def test_incomplete_checkpoints_of_a_killed_process_are_removed(tmp_path):
    checkpoints = saved(tmp_path, 1, 2, 3)
    shutil.copytree(checkpoints.path(3), tmp_path / ".tmp-step-00000004")
    shutil.copytree(checkpoints.path(3), tmp_path / ".old-step-00000000")
    assert checkpoints.list_steps() == [1, 2, 3]
    checkpoints.remove_after(2)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001", "step-00000002"}


def test_saving_a_step_again_replaces_it(tmp_path):
    checkpoints = saved(tmp_path, 1)
    model, optimizer = made()
    checkpoints.save(1, model, optimizer, {"note": "again"})
    assert checkpoints.load(1, model, optimizer)["note"] == "again"


# --- Damage


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "empty"])
def test_damage_is_found_and_the_previous_one_offered(unfinished, name, damage):
    run = unfinished
    path = run / "checkpoints" / "step-00000012" / name
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "flipped":
        # In a manifest, a bit of a hash: with another brace it would not even be JSON.
        place = data.index(b"sha256") + 15 if name == "manifest.json" else len(data) // 2
        data[place] ^= 1
        path.write_bytes(data)
    else:
        path.write_bytes(data[: len(data) // 2 if damage == "truncated" else 0])
    with pytest.raises(CheckpointError, match=r"step 8 can be used instead") as error:
        resume(run, console=quiet())
    assert "step-00000012" in str(error.value)
    if name != "manifest.json":
        assert name in str(error.value)
    assert resume(run, step=8, console=quiet())["why"] == "done"


def test_the_error_states_that_there_is_no_other_checkpoint(unfinished):
    run = unfinished
    for step in (4, 8):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    (run / "checkpoints" / "step-00000012" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="there is no other checkpoint"):
        resume(run, console=quiet())


class Payload:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_the_payload_creates_a_file(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "harm")))
    assert (tmp_path / "harm").exists()


@pytest.mark.parametrize("signed", [False, True], ids=["found by hash", "with a manifest to match"])
@pytest.mark.parametrize("saved_by", ["pickle", "torch"])
@pytest.mark.parametrize("name", [*FILES, "../best.json", "../../config.json", "../../log.jsonl", "../../events.jsonl"])
def test_a_pickle_is_never_executed(unfinished, tmp_path, name, saved_by, signed):
    run = unfinished
    harm, path = tmp_path / "harm", run / "checkpoints" / "step-00000012" / name
    if saved_by == "pickle":
        path.write_bytes(pickle.dumps(Payload(harm)))
    else:
        torch.save({"model": Payload(harm)}, path)
    if signed:
        manifest = run / "checkpoints" / "step-00000012" / "manifest.json"
        if name in FILES and name != "manifest.json":
            data = json.loads(manifest.read_text())
            data["files"][name] = {"sha256": sha256_of(path), "bytes": path.stat().st_size}
            manifest.write_text(json.dumps({key: x for key, x in data.items() if key != "checksum"}))
    if name in FILES:  # an unreadable mark is ignored; a line without an end is removed
        with pytest.raises((CheckpointError, RunError)):
            resume(run, console=quiet())
    for use in (lambda: resume(run, console=quiet()), lambda: load_run(run), lambda: evaluate(run, batches=1)):
        with contextlib.suppress(CheckpointError, RunError):
            use()
    assert not harm.exists()


# --- Runs


def test_evaluate_returns_the_loss_that_the_run_measured(run):
    measured = read_events(run, "evaluated")[-1]["loss"]
    found = evaluate(run, batches=2)
    assert (found["step"], found["loss"]) == (12, pytest.approx(measured, rel=1e-6))
    assert found["perplexity"] == pytest.approx(2 ** found["bits_per_token"])


def test_any_checkpoint_can_be_opened_and_the_best_by_minus_one(run):
    assert load_run(run, 4)[2] == 4
    losses = {event["step"]: event["loss"] for event in read_events(run, "evaluated") if event["step"]}
    assert load_run(run, -1)[2] == min(losses, key=losses.get)
    with pytest.raises(RunError, match="no checkpoint of step 5; there are 4, 8, 12"):
        load_run(run, 5)
    for step in losses:
        Checkpoints(run / "checkpoints", 1, Processes()).set_loss(step, float("nan"))
    with pytest.raises(RunError, match="has no best checkpoint"):
        load_run(run, -1)


def test_resuming_from_an_earlier_step_removes_the_later_ones(run, tmp_path):
    before = hashes(run, 12)
    assert resume(run, step=4, console=quiet())["step"] == 12
    assert [line["step"] for line in read_log(run)] == list(range(1, 13))
    assert hashes(run, 12) == before
    assert Checkpoints(run / "checkpoints", 1, Processes()).list_steps() == [4, 8, 12]
    with pytest.raises(RunError, match="no checkpoint of step 5; there are 4, 8, 12"):
        resume(run, step=5, console=quiet())


def test_a_finished_run_can_be_resumed_and_stays_as_it_is(run):
    before, log = hashes(run, 12), read_log(run)
    result = resume(run, console=quiet())
    assert (result["why"], result["step"], result["samples"]) == ("done", 12, 12 * BATCH)
    assert (hashes(run, 12), read_log(run)) == (before, log)
    assert (run / "result.json").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_file_that_the_manifest_does_not_list_is_not_loaded(unfinished, name):
    manifest = unfinished / "checkpoints" / "step-00000012" / "manifest.json"
    data = require_json(manifest)
    del data["files"][name]
    manifest.write_text(json.dumps(seal(data)))
    for use in (resume, load_run, evaluate):
        with pytest.raises(CheckpointError, match=f"does not list {name}; step 8 can be used instead"):
            use(unfinished)

"""The choice between int8 and float32 is measured once, stored, and repeated."""

import json

import pytest
import torch
from torch import nn

from trimtab.cli.about import doctor
from trimtab.nn import convert_linears, tuning
from trimtab.nn.linear import SwitchBackLinear
from trimtab.ops import backends

needs_int8 = pytest.mark.skipif(backends.int8_product()[0] == "reference", reason="int8 is never faster here")


@pytest.fixture
def file(monkeypatch, tmp_path):
    """A cache file of this test, a machine without other processes, and nothing known from before."""
    path = tmp_path / "trimtab" / "int8.json"
    monkeypatch.setattr(tuning, "cache_file", lambda: path)
    monkeypatch.setattr(tuning, "ALONE", 0.0)
    tuning._measure.cache_clear()
    tuning._warn_damaged.cache_clear()
    yield path
    tuning._measure.cache_clear()


@pytest.fixture
def timed(monkeypatch):
    """Shapes that were timed, with invented times: int8 gains from 256 tokens."""
    shapes = []

    def time_shape(n_in, n_out, device, dtype):
        shapes.append((n_in, n_out))
        return {"4096": [8.0, 4.0], "1024": [2.0, 1.5], "256": [1.0, 0.9], "64": [0.3, 0.4]}, 1.0

    monkeypatch.setattr(tuning, "_time_shape", time_shape)
    return shapes


@needs_int8
def test_a_shape_is_measured_once_and_then_read(file, timed):
    assert tuning.int8_from(64, 32) == tuning.int8_from(64, 32) == 256
    assert timed == [(64, 32)]
    tuning._measure.cache_clear()  # as in another process
    assert tuning.int8_from(64, 32) == 256
    assert timed == [(64, 32)]
    assert tuning.int8_from(32, 64) == 256
    assert timed == [(64, 32), (32, 64)]
    assert list(json.loads(file.read_text())["machines"]) == [tuning.machine()]


@needs_int8
def test_other_threads_are_another_machine(file, timed, monkeypatch):
    tuning.int8_from(64, 32)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    tuning.int8_from(64, 32)
    assert len(timed) == 2


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": 99, "machines": {}}', '{"format": 1, "machines": {"a": {"b": {"64": 3}}}}'],
)
@needs_int8
def test_a_damaged_file_is_replaced_with_one_warning(file, timed, text):
    file.parent.mkdir()
    file.write_text(text)
    with pytest.warns(UserWarning, match="is damaged or from another version") as caught:
        assert tuning.int8_from(64, 32) == 256
    assert len(caught) == 1
    assert tuning.machine() in json.loads(file.read_text())["machines"]


@needs_int8
def test_a_folder_that_cannot_be_written_is_no_error(file, timed):
    file.parent.write_text("a file in place of the folder")
    assert tuning.int8_from(64, 32) == 256
    assert tuning.int8_from(64, 32) == 256
    assert timed == [(64, 32)]


@needs_int8
def test_a_disturbed_measurement_is_not_stored(file, timed, monkeypatch):
    monkeypatch.setattr(tuning, "ALONE", 2.0)
    assert tuning.int8_from(64, 32) == 256
    assert not file.exists()


def test_int8_is_chosen_for_three_percent_and_not_for_less():
    assert tuning._choose({"4096": [1.03, 1.0]}) == 4096
    assert tuning._choose({"4096": [1.02, 1.0]}) == tuning.NEVER
    assert tuning._choose({"4096": [2.0, 1.0], "1024": [1.0, 1.0], "256": [2.0, 1.0]}) == 4096


@needs_int8
def test_measuring_takes_less_than_a_second_and_leaves_no_trace(file):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with torch.inference_mode():
        SwitchBackLinear(64, 48, when="faster").int8_from  # noqa: B018
    assert set(tuning.measure(64, 48)) <= {"4096", "1024", "256", "64"}
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), before)


@needs_int8
def test_the_choices_of_a_run_can_be_repeated_on_another_machine(file, timed, monkeypatch):
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))

    report = convert_linears(model())
    assert report.int8_from == {"0": 256, "1": 256}
    assert "in float below 256 tokens" in str(report)
    monkeypatch.setattr(tuning, "_time_shape", lambda *_: pytest.fail("measured again"))
    tuning._measure.cache_clear()
    file.unlink()
    again = model()
    assert convert_linears(again, when=report.int8_from).int8_from == report.int8_from
    with pytest.raises(ValueError, match="no choice for the layer '1', only for 0"):
        convert_linears(model(), when={"0": 5})


@needs_int8
def test_doctor_tunes_the_shapes_it_is_given(file, timed, capsys):
    assert doctor(tune=True, shapes=("48x16",)) == 0
    assert timed == [(48, 16)]
    assert "48 x 16" in capsys.readouterr().out
    with pytest.raises(ValueError, match="as INxOUT, got '48'; try 768x3072"):
        doctor(shapes=("48",))

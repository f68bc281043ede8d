"""Text for a terminal: escaped, and a run goes on without its terminal."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_faults import call
from tests.train.runs import tiny
from trimtab import cli
from trimtab.report.explain import explain
from trimtab.report.live import View
from trimtab.runs import EventKind, RunLog
from trimtab.screen import Screen, open_console, printable
from trimtab.train import train
from trimtab.train.progress import ProgressLine

ESC = "\x1b]0;title\x07\x1b[31m[/red]"


class Broken(io.StringIO):
    """A terminal that is gone after some text."""

    def __init__(self, room: int, error: Exception) -> None:
        super().__init__()
        self.room, self.error = room, error

    def write(self, text: str) -> int:
        if len(self.getvalue()) + len(text) > self.room:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), BrokenPipeError(32, "x"), ValueError("I/O")])
def test_text_is_dropped_after_the_first_error(error):
    screen = Screen(Broken(4, error))
    for _ in range(3):
        print("abc", file=screen)
    assert screen.stream.getvalue() == "abc\n"
    assert str(error.args[-1]) in str(screen.error)
    assert not screen.isatty()


def test_what_the_terminal_cannot_encode_is_escaped():
    raw = io.BytesIO()
    screen = Screen(io.TextIOWrapper(raw, "ascii"))
    print("é\udcff", file=screen)
    screen.flush()
    assert raw.getvalue() == b"\\xe9\\udcff\n"


def test_a_run_goes_on_without_its_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Broken(10, OSError(28, "No space left on device")))
    assert train(tiny(tmp_path, steps=2), tmp_path / "run")["why"] == "done"


COMMAND = str(Path(sys.executable).with_name("trimtab"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_and_a_closed_pipe_are_no_bugs():
    with open("/dev/full", "w") as full:
        done = subprocess.run([COMMAND, "recipes"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "error: cannot write the output: No space left on device\n")
    script = f"{COMMAND} recipes | head -1; {COMMAND} recipes >&-; {COMMAND} recpies 2>&-"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


def test_a_training_whose_output_is_lost_is_complete(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = tiny(tmp_path)
    words = [
        "--data.corpus",
        plain.data.corpus,
        "--data.cache",
        plain.data.cache,
        "--model.width",
        "32",
        "--steps",
        "2",
    ]
    monkeypatch.setattr(sys, "stdout", Broken(10, OSError(28, "No space left on device")))
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "gpt-tiny", "--model.depth", "1", "--batch", "2", *words])
    assert end.value.code == 0
    assert (tmp_path / "runs" / "gpt-tiny" / "result.json").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ImportError, SystemError])
def test_ctrl_c_in_an_import_is_an_interruption(capsys, error):
    """An import that is interrupted may raise anything."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in jobs that a shell put aside

    def interrupted() -> int:
        try:
            os.kill(os.getpid(), 2)
        except KeyboardInterrupt:
            raise error("half imported") from None
        return 0

    try:
        assert cli.run(interrupted) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "error: interrupted; nothing was saved\n"


def test_names_in_a_run_do_not_reach_the_terminal_raw(tmp_path, capsys):
    log = RunLog(tmp_path)
    for step in (1, 2):
        log._append(log.paths.log, {"step": step, "loss": 2.0, "grad_norm": 1.0, "length": ESC, ESC: ESC})
        tensors, layers = {f"blocks.{ESC}.weight": {"rms": 9.0}}, {ESC: {"logit_max": 3.0}}
        log.signals({"step": step, "loss": 2.0, "tensors": tensors, "layers": layers, "totals": {}})
    alarm = {"kind": ESC, "where": ESC, "signal": ESC, "value": 1.0, "usual": [1.0, 2.0], "advice": ESC}
    log.event(EventKind.ALARM, step=1, **alarm)
    log.event(EventKind.STOPPED, reason=ESC, step=2, **{ESC: ESC})
    log.event(EventKind.SKIPPED, reason=ESC, step=2)
    log.close()
    view, console = View(tmp_path), open_console()
    view.update()
    console.file = io.StringIO()
    console.print(view.render(200))  # markup such as [/red] would raise
    shown = console.file.getvalue() + str(explain(tmp_path))
    for command in ("watch", "explain", "report", "resume", "eval"):
        done = call(command, str(tmp_path))
        assert "Traceback" not in done.err
        shown += done.out + done.err
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "\\x1b]0;title" in shown


def test_a_message_of_a_run_is_not_markup(tmp_path):
    out = io.StringIO()
    console = open_console()
    console.file = out
    ProgressLine(tiny(tmp_path), shows=True, console=console).print("alarm in [/red]")
    assert out.getvalue() == "alarm in [/red]\n"


def test_printable_text_stays_as_it_is():
    assert printable("β₂ = 0.9, 日本") == "β₂ = 0.9, 日本"
    assert printable("a\nb\x1b\u202e") == "a\\nb\\x1b\\u202e"

"""The lock of a folder: one process at a time, released when the process ends, not held by forked children."""

import os
import signal
import subprocess
import sys

import pytest

from trimtab.runs import RunError, lock_folder

OWNER = """
import os, sys, time
from pathlib import Path
from trimtab.runs import lock_folder
with lock_folder(Path(sys.argv[1])):
    if sys.argv[2] == "fork" and os.fork() == 0:
        time.sleep(60)
    print("locked", os.getpid(), flush=True)
    time.sleep(60)
"""


def start_owner(folder, mode="alone"):
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(folder), mode], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == f"locked {process.pid}\n"
    return process


def test_a_second_process_is_refused_with_the_first_ones_id(tmp_path):
    owner = start_owner(tmp_path / "run")
    try:
        with (
            pytest.raises(RunError, match=rf"run is in use by process {owner.pid}; wait for it"),
            lock_folder(tmp_path / "run"),
        ):
            pass
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()


def test_a_killed_owner_leaves_no_lock(tmp_path):
    owner = start_owner(tmp_path / "run")
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    with lock_folder(tmp_path / "run"):
        assert (tmp_path / "run" / ".owner").read_text() == str(os.getpid())


def test_a_forked_child_does_not_keep_the_lock_of_a_killed_owner(tmp_path):
    owner = start_owner(tmp_path / "run", "fork")
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(owner.pid)], capture_output=True, text=True).stdout
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    try:
        assert len(children.split()) == 1
        with lock_folder(tmp_path / "run"):
            pass
    finally:
        for child in children.split():
            os.kill(int(child), signal.SIGKILL)


def test_a_released_folder_has_no_trace_of_the_lock(tmp_path):
    with lock_folder(tmp_path / "run"):
        (tmp_path / "run" / "file").touch()
        with pytest.raises(RunError, match="is in use"), lock_folder(tmp_path / "run"):
            pass
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["file"]
    with lock_folder(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot write to .*file/run: "), lock_folder(tmp_path / "file" / "run"):
        pass

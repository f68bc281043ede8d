"""Run folders that version 0.1.0 wrote (format 1).

run/     a complete run with a checkpoint            study/   a complete study, without checkpoints
half/    a study that was stopped: INTERRUPTED is a run that was stopped, with its checkpoint
text/    the corpus; configs name it "text", so tests work in the unpacked folder
"""

import tarfile
from pathlib import Path

ARCHIVE = Path(__file__).parent.parent / "fixtures" / "v1.tar.xz"
INTERRUPTED = "half/cells/1x32/steadied/lr-1/seed-0"


def unpack(folder: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder / "v1"

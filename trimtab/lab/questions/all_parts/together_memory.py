"""How much memory does a training step need with all parts together? The 8-bit state has 2 bytes per parameter in place
of 8 (Dettmers et al. 2022); SwitchBack-M keeps the inputs of linear layers in 8 bits (Wortsman et al. 2023a).

Here each setting trains a few steps of a GPT of 25M parameters in a process of its own, whose largest resident memory
it reports; that of the same process with a model of one layer of width 32 is subtracted. Sequence length warmup is left
out: the peak is that of full length.

After the runs: the 8-bit state saves memory, and int8 layers take part of it back, SwitchBack-M too. Why was not
examined; with 1024 tokens the activations are small beside 25M weights, which have 8-bit codes too. `python -m
bench.memory` has larger models, with checkpointing.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trimtab.analysis.answers import Table
from trimtab.lab.interventions import apply
from trimtab.lab.questions.all_parts.together import ALL, ARMS, PLAIN
from trimtab.lab.questions.question import Checks, Measurement, Numbers, judge
from trimtab.lab.sizes import parse_size, scaled
from trimtab.lab.subjects import study_base
from trimtab.runs import RunError
from trimtab.train.config import RunConfig, to_json, with_values

SIZE, TINY, STEPS = "8x512", "1x32", 3
SETTINGS = {
    PLAIN: (),
    "8-bit state": ("8-bit",),
    "SwitchBack": ("switchback",),
    "SwitchBack-M": ("switchback-m",),
    ALL: tuple(switch for switch in ARMS[ALL] if not switch.startswith("seqlen")),
    "all, with SwitchBack-M": tuple("switchback-m" if x == "switchback" else x for x in ARMS[ALL] if x[:6] != "seqlen"),
}
MIB = 2**20
# The child trains and writes its peak. On Linux the one that its parent could read from the system is not below the
# parent's own, which is large after other questions.
CHILD = """
import io, json, resource, sys
from pathlib import Path
from rich.console import Console
from trimtab.train import train
from trimtab.train.config import from_json
config, run, peak = map(Path, sys.argv[1:])
train(from_json(json.loads(config.read_text())), run, console=Console(file=io.StringIO()))
status = Path("/proc/self/status")
lines = status.read_text().splitlines() if status.exists() else []
here = [1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
peak.write_text(str(here[0] if here else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))  # macOS: in bytes
"""


def base(size: str) -> RunConfig:
    own = {"model.context": 128, "batch": 8, "watch.every": 0, "eval_batches": 1, "eval_every": STEPS, "threads": 2}
    return scaled(with_values(study_base("gpt-lab", STEPS), own), parse_size(size))


def measure(folder: Path, *, size: str = SIZE, settings: Sequence[str] = tuple(SETTINGS)) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    empty = peak_memory(base(TINY))
    rows = []
    for name in settings:
        config = base(size)
        for switch in SETTINGS[name]:
            config = apply(config, switch)
        rows.append({"name": name, "mib": (peak_memory(config) - empty) / MIB})
    return {"rows": rows}


def peak_memory(config: RunConfig) -> int:
    """The largest resident memory of a process that trains this run, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path, peak = Path(folder) / "config.json", Path(folder) / "peak"
        path.write_text(json.dumps(to_json(config)), encoding="utf-8")
        command = [sys.executable, "-c", CHILD, str(path), str(Path(folder) / "run"), str(peak)]
        child = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if child.returncode:
            raise RunError(f"a process that was measured ended with code {child.returncode}")
        return int(peak.read_text(encoding="utf-8"))


def check(numbers: Numbers) -> Checks:
    found = {row["name"]: row["mib"] for row in numbers["rows"]}
    claim = "all together need less memory than plain AdamW (MiB above an empty run)"
    yield judge(claim, {name: found.get(name) for name in (PLAIN, ALL)}, lambda plain, together: together < plain)
    claim = "8-bit state alone saves memory"
    yield judge(claim, {name: found.get(name) for name in (PLAIN, "8-bit state")}, lambda plain, state: state < plain)
    best = "all, with SwitchBack-M"
    claim = "with SwitchBack-M they need less than with SwitchBack"
    yield judge(claim, {name: found.get(name) for name in (ALL, best)}, lambda together, saved: saved < together)


def tables(numbers: Numbers) -> Iterable[Table]:
    rows = [(row["name"], round(row["mib"])) for row in numbers["rows"]]
    yield Table("Peak memory of training", ("setting", "MiB above an empty run"), rows)


QUESTION = Measurement(
    "together-memory",
    __doc__,
    measure,
    check,
    minutes=2.0,
    paper="all",
    design=f"{SIZE}, 8 rows of 128 tokens, {STEPS} steps in a new process for each setting, 2 threads.",
    tables=tables,
)

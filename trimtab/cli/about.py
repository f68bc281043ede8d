"""Commands about recipes and about this installation."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.cli.options import configure, list_recipes

if TYPE_CHECKING:
    from rich.table import Table


def recipes() -> int:
    """List the recipes."""
    print(list_recipes())
    return 0


def schedule(recipe: str, /, *, svg: Path | None = None, fields: tuple[str, ...] = ()) -> int:
    """Show learning rate, sequence length and batch size over a run, without training.

    Args:
        svg: also write the drawing to this file
    """
    config = configure(recipe, fields, "schedule")
    from trimtab.train.plan import draw_plan

    drawing = draw_plan(config)
    print(drawing.text)
    if svg is not None:
        svg.write_text(drawing.svg)
        print(f"wrote {svg}")
    return 0


def doctor(*, tune: bool = False, shapes: tuple[str, ...] = (), gpu: bool = False, interpret: bool = False) -> int:
    """Self-test: which kernels are available, and do they match the reference?

    Exits with 1 if something expected is broken.

    Args:
        gpu: compare every op, optimizer and layer on the GPU with its definition
        interpret: with --gpu, run the GPU kernels on the CPU, in Triton's interpreter; needs no GPU
        tune: also measure from how many tokens linear layers are faster in int8, and store it for later runs
        shapes: of the layers that --tune measures, as INxOUT (768x3072); by default those of GPTs of width 128 to 1024
    """
    if gpu or interpret:
        return _check_gpu(interpret)
    from rich.console import Console
    from rich.table import Table

    from trimtab.ops.doctor import examine

    report = examine()
    console = Console()
    machine = Table("machine", "", box=None, pad_edge=False)
    for name, value in report.machine.items():
        machine.add_row(name, value)
    served = Table("op", "device", "served by", "because", box=None, pad_edge=False)
    for row in report.served:
        served.add_row(row.op, row.device, row.backend, row.reason)
    console.print(machine, "", served, "")
    for line in report.missing:
        console.print(f"[yellow]missing[/] {line}", highlight=False)
    for line in report.broken:
        console.print(f"[red]broken[/] {line}", highlight=False)
    if not report.broken:
        console.print("[green]ok[/] every op matches its reference", highlight=False)
    if tune or shapes:
        console.print("", _tune(shapes))
    return 1 if report.broken else 0


def _check_gpu(interpret: bool) -> int:
    from rich.console import Console

    from trimtab.ops import backends

    if interpret and not backends.interpreted:  # the kernels are chosen when trimtab is imported
        again = [sys.executable, "-m", "trimtab", "doctor", "--gpu", "--interpret"]
        return subprocess.run(again, env=os.environ | {"TRIMTAB_INTERPRET": "1"}, check=False).returncode
    if backends.triton_missing is not None:
        raise ValueError(
            f"the GPU kernels cannot run: {backends.triton_missing}; `trimtab doctor --gpu --interpret` runs them on "
            "the CPU, in Triton's interpreter"
        )
    import torch

    from trimtab.cli.gpu import examine_gpu

    console, wrong, left = Console(), 0, []
    device = torch.device("cpu" if interpret else "cuda")
    where = "Triton's interpreter" if interpret else torch.cuda.get_device_name()
    console.print(f"{where}, torch {torch.__version__}", highlight=False)
    for result in examine_gpu(device):
        if result.not_run is not None:
            left.append(f"{result.name} ({result.not_run})")
            continue
        console.print(f"{'[red]wrong[/]' if result.wrong else '[green]ok[/]   '} {result.name}", highlight=False)
        for line in result.wrong:
            console.print(f"      {line}", highlight=False, markup=False)
        wrong += len(result.wrong)
    if left:
        console.print(f"not run: {'; '.join(left)}", highlight=False, soft_wrap=True)
    return 1 if wrong else 0


def _tune(shapes: tuple[str, ...]) -> "Table":
    from rich.table import Table

    from trimtab.nn.tuning import NEVER, cache_file, int8_from, measure

    widths = (128, 256, 384, 512, 768, 1024)
    usual = [(w * a, w * b) for w in widths for a, b in ((1, 3), (1, 1), (1, 4), (4, 1))]
    table = Table("layer", "int8 from", "tokens: speed-up of int8", box=None, pad_edge=False)
    for n_in, n_out in [_read_shape(shape) for shape in shapes] or usual:
        least, times = int8_from(n_in, n_out), measure(n_in, n_out)
        gains = "   ".join(f"{tokens}: {a / b:.2f}x" for tokens, (a, b) in times.items())
        table.add_row(f"{n_in} x {n_out}", "never" if least == NEVER else f"{least} tokens", gains)
    table.caption = f"stored in {cache_file() or 'no file: there is no home folder'}"
    return table


def _read_shape(shape: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", shape)
    if match is None:
        raise ValueError(f"--shapes takes sizes of layers as INxOUT, got {shape!r}; try 768x3072")
    return int(match[1]), int(match[2])

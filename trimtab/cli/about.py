"""Commands about recipes and about this installation."""

import re
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


def doctor(*, tune: bool = False, shapes: tuple[str, ...] = ()) -> int:
    """Self-test: which kernels are available, and do they match the reference?

    Exits with 1 if something expected is broken.

    Args:
        tune: also measure from how many tokens linear layers are faster in int8, and store it for later runs
        shapes: of the layers that --tune measures, as INxOUT (768x3072); by default those of GPTs of width 128 to 1024
    """
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

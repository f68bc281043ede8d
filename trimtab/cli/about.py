"""Commands about recipes and about this installation."""

from pathlib import Path

from trimtab.cli.options import configure, list_recipes


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


def doctor() -> int:
    """Self-test: which kernels are available, and do they match the reference?

    Exits with 1 if something expected is broken.
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
    return 1 if report.broken else 0

"""Words a person typed, turned into one call."""

import sys

import tyro
from rich.console import Console
from rich.table import Table


def doctor() -> int:
    """Say which kernel serves each op on this machine and why, and check every one of them.

    Exits with 1 if something expected is broken.
    """
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
        console.print("[green]well[/] every op agrees with its reference", highlight=False)
    return 1 if report.broken else 0


def main() -> None:
    """The `trimtab` command."""
    sys.exit(tyro.extras.subcommand_cli_from_dict({"doctor": doctor}, prog="trimtab", description=__doc__))


if __name__ == "__main__":
    main()

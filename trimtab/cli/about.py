"""What there is: recipes, what they will do, and what serves each op here."""

from pathlib import Path

from trimtab.cli.words import BAD_INPUT, find_recipe, guarded, list_recipes, override, parse, take, verb


@verb("recipes", "the runs that have a name")
def _recipes(words: list[str]) -> int:
    def recipes_() -> int:
        """List the runs that have a name."""
        print(list_recipes())
        return 0

    return parse(recipes_, words, "recipes")


@verb("schedule", "what a recipe will do: learning rate, length and batch over the run")
def _schedule(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print("usage: trimtab schedule RECIPE [--svg FILE] [--FIELD VALUE ...]")
        return 0 if words else BAD_INPUT
    svg, rest = take(words[1:], "--svg")
    config = override(find_recipe(words[0]), rest, f"trimtab schedule {words[0]}")
    from trimtab.train.plan import draw_plan

    picture = guarded(lambda: draw_plan(config))
    print(picture.text)
    if svg is not None:
        guarded(lambda: Path(svg).write_text(picture.svg))
        print(f"wrote {svg}")
    return 0


@verb("doctor", "which kernel serves each op here and why, and whether all are well")
def _doctor(words: list[str]) -> int:
    return parse(doctor, words, "doctor")


def doctor() -> int:
    """Say which kernel serves each op on this machine and why, and check every one of them.

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
        console.print("[green]well[/] every op agrees with its reference", highlight=False)
    return 1 if report.broken else 0

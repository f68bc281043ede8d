"""Parsing: commands and their options by tyro, fields of a config by `with_values`; mistakes in one line.

    trimtab train gpt-tiny --out runs/a --optim.lr 0.01 --batch 32
            command  argument  option      fields of the recipe's config

A command whose config can be changed has a parameter `fields`. It receives all options that are not its own, and
`override` applies them. torch and tyro are imported where they are needed, so that --help is quick.
"""

import ast
import contextlib
import inspect
import io
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from trimtab.screen import printable

if TYPE_CHECKING:
    from trimtab.runs import End
    from trimtab.train import RunConfig

BAD_INPUT, FAILED, INTERRUPTED, TERMINATED = 2, 1, 130, 143
HELP = ("-h", "--help")
Commands = Mapping[str, Callable[..., int]]
DESCRIPTION = "Stable, low-precision, memory-lean Transformer training."
# Parameters of a command that `parse` fills: options that are fields of a config, and the whole command line.
HIDDEN = ("fields", "command")
# Positional parameters of several commands: their name in the help, and their description.
POSITIONAL = {
    "recipe": ("RECIPE", "a recipe, or your own model as package.file:function"),
    "folder": ("DIR", "folder of the run or study"),
}


def refuse(message: str) -> NoReturn:
    """Exit with a one-line error: the input is wrong."""
    print(f"error: {printable(message)}", file=sys.stderr)
    sys.exit(BAD_INPUT)


def parse(commands: Commands, words: list[str]) -> Callable[[], int]:
    """The call that a command line asks for."""
    name, *rest = words or [""]
    if not name or name in HELP:
        print(f"usage: trimtab COMMAND ...\n\n{DESCRIPTION}\n\ncommands (`trimtab COMMAND --help` describes one):")
        for known, function in commands.items():
            print(f"  {known:12} {(function.__doc__ or '').splitlines()[0]}")
        sys.exit(0 if name else BAD_INPUT)
    if name not in commands:
        from trimtab.hints import did_you_mean

        refuse(f"unknown command {name!r}.{did_you_mean(name, commands)} `trimtab --help` lists the commands")
    parameters = inspect.signature(commands[name]).parameters
    own = ["--" + _normal(parameter) for parameter in parameters if parameter not in HIDDEN]
    hidden: dict[str, Any] = {"command": shlex.join(["trimtab", *words])} if "command" in parameters else {}
    if "fields" not in parameters:
        for option, _ in group(rest):
            _check(option, own)
        return partial(_call(commands, words), **hidden)
    if not rest:
        with contextlib.suppress(SystemExit):
            _call(commands, [name, "--help"])
        sys.exit(BAD_INPUT)
    target = next(iter(parameters))
    if rest[0].startswith("-") and rest[0] not in HELP:
        refuse(f"the {target} comes first: trimtab {name} {target.upper()} {rest[0]} ...")
    kept, fields = list[str](), list[str]()
    for option, values in group(rest):
        chosen = kept if option is None or _normal(option) in (*own, *HELP) else fields
        chosen += [option, *values] if option else values
    if rest[0] not in HELP and {*HELP} & {*kept}:
        return partial(commands[name], rest[0], fields=("--help",))
    return partial(_call(commands, [name, *kept]), fields=tuple(fields), **hidden)


def group(words: Sequence[str]) -> Iterator[tuple[str | None, list[str]]]:
    """Options with the values that follow them; the option is None for words before the first."""
    option: str | None = None
    values: list[str] = []
    for word in words:
        if re.match("--[a-z]|-h$", word):
            yield option, values
            option, equals, value = word.partition("=")
            values = [value] if equals else []
        else:
            values.append(word)
    yield option, values


def _normal(option: str) -> str:
    return option.replace("_", "-")


def _check(option: str | None, known: list[str]) -> None:
    """tyro reports an unknown option; this also reports the one that was probably meant."""
    if option is not None and _normal(option) not in (*known, *HELP):
        from trimtab.hints import did_you_mean

        hint = did_you_mean(_normal(option), known)
        refuse(f"unrecognized option {option}{'.' + hint if hint else '; --help lists the options'}")


# --- tyro


def _call(commands: Commands, words: list[str]) -> Callable[..., int]:
    """Let tyro parse the words. Its error message is reduced to one line."""
    import tyro

    errors, name = io.StringIO(), words[0]
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(
                _deferred(commands[name]),
                prog=f"trimtab {name}",
                args=words[1:],
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as end:
        if end.code not in (0, None):
            refuse(_unboxed(errors.getvalue()))
        if "recipe" in inspect.signature(commands[name]).parameters:
            print(f"\nRecipes (`trimtab {name} RECIPE --help` lists the fields of one):\n{list_recipes()}")
        raise


def _deferred(function: Callable[..., int]) -> Callable[..., Callable[..., int]]:
    """A function that returns the call instead of making it, so that only errors of the parser are caught."""
    from tyro.conf import arg

    def bind(*args: Any, **kwargs: Any) -> Callable[..., int]:
        return partial(function, *args, **kwargs)

    shown = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in POSITIONAL:
            metavar, text = POSITIONAL[parameter.name]
            parameter = parameter.replace(annotation=Annotated[parameter.annotation, arg(metavar=metavar, help=text)])
        if parameter.name not in HIDDEN:
            shown.append(parameter)
    bind.__doc__, bind.__name__ = function.__doc__, function.__name__
    bind.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    bind.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return bind


def _unboxed(text: str) -> str:
    """The first paragraph of a message inside tyro's box, or, in ASCII, below its rule."""
    lines = [line.strip("│ ") for line in text.splitlines()]
    rules = [i for i, line in enumerate(lines) if line and not line.strip("─-╭╮╰╯")]
    first = 1 if text.startswith("╭") or not rules else rules[0] + 1  # after the title
    last = next((i for i in rules if i > first), len(lines))
    message = " ".join(lines[first:last]).strip().removeprefix("Error parsing ") or text.strip()
    return re.sub(r"no type matching \{None\}\|(\w+) .*? from \[(.*?)\].*", r"\2 is not \1", message)


# --- Recipes and the fields of their configs


def list_recipes() -> str:
    # Parsed, not imported: importing the recipes would import torch.
    source = ast.parse((Path(__file__).parent.parent / "recipes.py").read_text())
    functions = {node.name: node for node in source.body if isinstance(node, ast.FunctionDef)}
    table: Any = next(node.value for node in source.body if isinstance(node, ast.AnnAssign))
    pairs = [(key.value, functions[value.id]) for key, value in zip(table.keys, table.values, strict=True)]
    return "\n".join(f"  {name:14} {(ast.get_docstring(node) or '').splitlines()[0]}" for name, node in pairs)


def configure(recipe: str, fields: tuple[str, ...], command: str) -> "RunConfig":
    """The config of a recipe, or of the user's own model as package.file:function, with fields changed."""
    from trimtab.lab.subjects import open_subject

    return override(open_subject(recipe), fields, f"trimtab {command} {recipe}")


def override(config: "RunConfig", words: tuple[str, ...], prog: str) -> "RunConfig":
    """The config with fields changed by options such as --optim.lr 0.01; --help lists all fields."""
    from trimtab.train.config import flatten, to_json, with_values

    if "--help" in words:
        import tyro

        tyro.cli(type(config), default=config, args=["--help"], prog=prog, config=(tyro.conf.FlagConversionOff,))
    known = flatten(to_json(config))
    fields = ["--" + _normal(name) for name in known if name != "kind"]
    given: dict[str, Any] = {}
    for option, values in group(words):
        if option is None:
            continue
        name = option.removeprefix("--").replace("-", "_")
        free = name.startswith("model.options.") and hasattr(config.model, "options")
        if not free and not name.endswith(".end"):  # `with_values` explains the ends of schedules
            _check(option, fields)
        if isinstance(known.get(name), list):
            given[name] = values
        elif len(values) > 1:
            refuse(f"unexpected {values[1]!r} after {option} {values[0]}")
        elif not values and not isinstance(known.get(name), bool):
            refuse(f"missing value for {option}")
        else:
            given[name] = _from_json(values[0]) if free else values[0] if values else True
    return with_values(config, given)


def _from_json(text: str) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text


def exit_code(end: "End | str") -> int:
    from trimtab.runs import End

    codes = {End.DONE: 0, End.INTERRUPTED: INTERRUPTED, End.TERMINATED: TERMINATED}
    return next((code for known, code in codes.items() if known == end), FAILED)


def local(folder: Path) -> Path:
    """A folder of this machine. Addresses such as s3://bucket/run are refused."""
    if re.match("[a-z][a-z0-9+.-]+:/", str(folder)):
        refuse(f"{folder} is an address, and a run is written to a folder of this machine; use a folder and copy it")
    return folder

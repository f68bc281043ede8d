"""MkDocs hook: pages from outside docs/, links to source files, and names that are also modules.

The Markdown files are written to be read in the repository too, where `../trimtab/nn/gpt.py` and `../README.md` are the
right links. On the site such a link goes to the API reference of that package (`reference/nn.md`) or to the home page.
A link to a file that does not exist stays as it is, so that `mkdocs build --strict` reports it.

`::: trimtab.schedule` documents the names in `__all__`, except those that are also modules: `trimtab.schedule.plan` is
both a function and a file. They are added here. Undocumented members of classes are left out: the fields of a dataclass
are already in its signature.
"""

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
OUTSIDE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s:]+)\)")


class DocumentedMembers(griffe.Extension):
    """Leave the undocumented members of classes out of the API reference."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        self._prune(pkg)

    def _prune(self, parent: griffe.Object) -> None:
        for name, member in list(parent.members.items()):
            if member.is_alias:
                continue
            if parent.is_class and name != "__init__" and member.docstring is None:
                del parent.members[name]
            elif member.is_module or member.is_class:
                self._prune(member)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are in the root of the repository."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave docs/ to a page of the site, and complete the pages of the API reference."""
    path = page.file.src_uri
    folder = "" if path in OUTSIDE.values() else posixpath.join("docs", posixpath.dirname(path))

    def replace(match: re.Match[str]) -> str:
        text, link = match.groups()
        target, _, anchor = link.partition("#")
        source = posixpath.normpath(posixpath.join(folder, target))
        found = target and _find_page(source)
        if not found:
            return match[0]
        anchor = f"#{anchor}" if anchor and source.startswith("docs/") else ""  # others are replaced by another page
        return f"[{text}]({posixpath.relpath(found, posixpath.dirname(path) or '.')}{anchor})"

    return LINK.sub(replace, markdown) + "".join(_name_modules(Path(path)))


def _find_page(target: str) -> str | None:
    """The page of the site for a path in the repository; None if there is no such file."""
    if not (ROOT / target).exists():
        return None
    if target in OUTSIDE:
        return OUTSIDE[target]
    first, *rest = target.split("/")
    if first == "docs":
        return "/".join(rest)
    if first == "trimtab" and rest and (ROOT / "docs/reference" / f"{rest[0]}.md").exists():
        return f"reference/{rest[0]}.md"
    return "reference/index.md" if first == "trimtab" else "index.md"


def _name_modules(path: Path) -> list[str]:
    """Markdown for the names of a package's `__all__` that are also the names of its modules."""
    package = ROOT / "trimtab" / path.stem
    if path.parent.name != "reference" or not package.is_dir():
        return []
    tree = ast.parse((package / "__init__.py").read_text())
    values = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node).startswith("__all__")
    ]
    added = []
    for name in [name for value in values for name in ast.literal_eval(value)]:
        files = [file for file in (package / f"{name}.py", package / name / "__init__.py") if file.exists()]
        if files:
            function = f".{name}" if f"def {name}(" in files[0].read_text() else ""
            heading = "options: {show_root_heading: true, show_root_toc_entry: true}"
            added.append(f"\n\n::: trimtab.{path.stem}.{name}{function}\n    {heading}\n")
    return added

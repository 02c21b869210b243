"""Pages that the documentation site gets at its build: the reference, the pages of the root, the examples.

mkdocs calls the functions `on_...` (see mkdocs.yml). `SITE_REFERENCE=false` leaves out the API and the
programs behind `fireflyer demo|bench|plan|lab`, which takes seconds instead of most of a minute.
"""

import ast
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
COMPLETE = os.environ.get("SITE_REFERENCE", "true") == "true"
ROOT_PAGES = {
    f"{name}.md": f"{name}.md" for name in ("ARCHITECTURE", "CONTRIBUTING", "CHANGELOG", "SECURITY")
}
ROOT_PAGES["README.md"] = "project/README.md"  # at the top it would be the index
MODULES = {
    "hfreduce": ["hfreduce"],
    "haiscale": [
        "haiscale", "haiscale.ddp", "haiscale.fsdp", "haiscale.mesh", "haiscale.pipeline",
        "haiscale.tensor", "haiscale.expert",
    ],
    "checkpoint": ["checkpoint"],
    "ffrecord": ["ffrecord", "ffrecord.torch"],
    "datasets": ["datasets"],
    "fs3": ["fs3"],
    "kv": ["kv"],
    "hai": ["hai"],
    "nn": ["nn", "nn.functional", "nn.quant"],
    "envpool": ["envpool"],
    "experts": ["experts"],
    "storage": ["storage"],
    "lab": ["lab"],
    "errors": ["errors"],
}  # fmt: skip
"""Modules whose public names a page of the reference has."""
BASES_SHOWN = {"haiscale"}
"""Parts whose classes are shown with the members of their bases, which have no entry themselves."""

LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
MENTION = re.compile(r"(?<![\w/.])docs/[\w/-]+\.(?:md|svg|png)\b")
SOURCES = {".cpp", ".hpp", ".inl", ".md", ".py", ".pyi", ".sh", ".toml", ".txt"}
_log = logging.getLogger("mkdocs.hooks.site")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the pages of the reference into the navigation."""
    api = [{name: f"reference/api/{name}.md"} for name in MODULES]
    verbs = [{f"fireflyer {name}": f"reference/cli/{name}.md"} for name in _commands()]
    assert config.nav is not None
    for entry in config.nav:
        if "Reference" in entry:
            entry["Reference"] = [{"Python": api}, {"Command line": verbs}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made here."""
    for name, uri in ROOT_PAGES.items():
        _add(files, config, uri, (ROOT / name).read_text())
    for script in sorted((ROOT / "examples").glob("*.py")):
        code = script.read_text()
        _add(
            files,
            config,
            f"examples/{script.stem}.md",
            f"# {script.name}\n\n```python\n{code}```\n",
        )
    for verb, command in _commands().items():
        page = "\n".join(_help(command, f"fireflyer {verb}", 1))
        _add(files, config, f"reference/cli/{verb}.md", page)
    for part, modules in MODULES.items():
        _add(files, config, f"reference/api/{part}.md", "\n".join(_api(part, modules)))
    for place, name in _dead_mentions():
        _log.warning("%s mentions %s, which does not exist", place, name)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Leads links to files outside of docs/ to their pages in the site."""
    uri = page.file.src_uri
    folder = "" if page.file.generated_by else os.path.dirname(f"docs/{uri}")

    def lead(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        if ":" in target or uri.startswith(("examples/", "reference/")):
            return link[0]
        path = os.path.normpath(os.path.join(folder, target))
        if path.startswith("docs/"):
            to = path.removeprefix("docs/")
        elif path in ROOT_PAGES:
            to = ROOT_PAGES[path]
        elif path.startswith("examples/") and (ROOT / path).exists():
            to = f"examples/{Path(path).stem}.md"
        else:
            return link[0]
        return f"]({os.path.relpath(to, os.path.dirname(uri) or '.')}{anchor})"

    return LINK.sub(lead, markdown)


def _add(files: Files, config: MkDocsConfig, uri: str, text: str) -> None:
    made = File.generated(config, uri, content=text)
    if uri.startswith(("examples/", "project/")):
        made.inclusion = InclusionLevel.NOT_IN_NAV
    files.append(made)


def _commands() -> dict[str, Any]:
    """Returns the verbs of `fireflyer` by name."""
    from fireflyer.cli.app import app

    group: Any = typer.main.get_command(app)
    return {name: each for name, each in sorted(group.commands.items()) if not each.hidden}


def _help(command: Any, name: str, level: int) -> Iterator[str]:
    """Yields the lines of a page of the command line: the help that the program prints."""
    context = typer.Context(command, info_name=name, terminal_width=96, max_content_width=96)
    text = command.get_help(context)
    if not any("help" in option for each in command.get_params(context) for option in each.opts):
        text = _program(name) if COMPLETE else text  # the verb hands over to another program
    yield from (f"{'#' * level} {name}", "", "```text", text.strip(), "```", "")
    for each, below in sorted(getattr(command, "commands", {}).items()):
        if not below.hidden:
            yield from _help(below, f"{name} {each}", min(level + 1, 3))


def _program(name: str) -> str:
    line = [sys.executable, "-P", "-m", "fireflyer.cli", *name.split()[1:], "--help"]
    environment = {**os.environ, "COLUMNS": "96"}
    return subprocess.run(line, capture_output=True, text=True, check=True, env=environment).stdout


def _api(part: str, modules: list[str]) -> Iterator[str]:
    """Yields the lines of a page of the reference, which mkdocstrings fills."""
    yield f"# {part}\n"
    for module in modules if COMPLETE else ():
        path = ROOT / "src" / "fireflyer" / module.replace(".", "/")
        names = _public(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
        yield f"::: fireflyer.{module}\n    options:\n      show_root_full_path: true\n      members: false\n"
        for name in names:
            inherited = f"      inherited_members: {str(part in BASES_SHOWN).lower()}\n"
            yield f"::: fireflyer.{module}.{name}\n    options:\n      heading_level: 3\n{inherited}"


def _public(path: Path) -> list[str]:
    """Returns the names in `__all__`; without it the classes and functions without an underscore.

    Names of modules, and of objects that come from another package, are left out.
    """
    tree = ast.parse(path.read_text())
    foreign = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("fireflyer")
        for alias in node.names
    }
    modules = {each.stem for each in path.parent.iterdir()} if path.stem == "__init__" else set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            hidden = foreign | modules | {"__version__"}
            return [name for name in names if name not in hidden]
    kinds = ast.ClassDef | ast.FunctionDef
    return [n.name for n in tree.body if isinstance(n, kinds) and not n.name.startswith("_")]


def _dead_mentions() -> Iterator[tuple[str, str]]:
    """Yields the places in source files that name a page or picture of docs/ which does not exist."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for path in map(Path, listed.stdout.splitlines()):
        if path.suffix in SOURCES and (ROOT / path).is_file():
            for name in MENTION.findall((ROOT / path).read_text()):
                if not (ROOT / name).exists():
                    yield str(path), name

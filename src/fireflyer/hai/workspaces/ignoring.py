"""Which names .gitignore files leave out, by git's own rules (gitignore(5)).

The deepest file that has a matching pattern decides, in it the last pattern; what is in a directory that is
left out cannot be taken back in. Above the files of the folders comes `.git/info/exclude`. Nobody's personal
excludes are read, nor the index: a tracked file that a pattern names is left out, too.
"""

from pathlib import Path

from pathspec import GitIgnoreSpec, RegexPattern

from fireflyer.errors import WorkspaceError

NAME = ".gitignore"


class Rules:
    """The rules in force in one directory; the root's have no parent."""

    def __init__(self, prefix: str, spec: GitIgnoreSpec | None, parent: "Rules | None") -> None:
        self._prefix = prefix
        self._spec = spec
        self._parent = parent

    def below(self, prefix: str, file: Path) -> "Rules":
        """Those of a directory `prefix` ("a/b/"), which may have a file of its own."""
        spec = _read(file)
        return self if spec is None else Rules(prefix, spec, self)

    def leave_out(self, path: str, *, directory: bool) -> bool:
        """Whether a name that is in this directory or deeper is left out.

        Args:
            path: from the top that the rules were read from, separated by "/".
            directory: patterns that end in "/" are for directories alone.
        """
        here: Rules | None = self
        while here is not None:
            if here._spec is not None:
                name = path[len(here._prefix) :] + ("/" if directory else "")
                for pattern in reversed(here._spec.patterns):
                    if pattern.include is not None and _names(pattern, name):
                        return pattern.include
            here = here._parent
        return False


def _names(pattern: RegexPattern, name: str) -> bool:
    """Whether a pattern is about this name itself, and not about a directory that it is in: of that the
    directory's own rules have decided."""
    regex = pattern.regex
    if regex is None:
        return False
    if "ps_d" not in regex.groupindex:  # what is below a directory, but not that itself: a/**
        return regex.search(name.removesuffix("/")) is not None
    if regex.pattern == "(?P<ps_d>/)":  # any directory: */
        return name.endswith("/")
    return regex.fullmatch(name) is not None


def rules_of(root: Path) -> tuple[Rules, str]:
    """The rules in force in a folder, and its path from the top of its repository ("" or "a/b/").

    Raises:
        WorkspaceError: a file of rules cannot be read.
    """
    top = next((folder for folder in (root, *root.parents) if (folder / ".git").exists()), root)
    rules = Rules("", _read(top / ".git" / "info" / "exclude"), None)
    prefix = ""
    rules = rules.below(prefix, top / NAME)
    for part in root.relative_to(top).parts:
        prefix += part + "/"
        rules = rules.below(prefix, top / prefix / NAME)
    return rules, prefix


def _read(file: Path) -> GitIgnoreSpec | None:
    try:
        if file.is_symlink() or not file.is_file():  # git does not follow a link here
            return None
        lines = file.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
        return GitIgnoreSpec.from_lines(lines)
    except OSError as error:
        raise WorkspaceError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise WorkspaceError(f"{file} has a pattern that cannot be read: {error}") from None

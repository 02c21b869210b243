"""Decides which names .gitignore files leave out, by git's own rules (gitignore(5)).

The deepest file with a matching pattern decides; within the file, the last matching pattern
decides. A name in a directory that is left out cannot be included again. `.git/info/exclude` ranks
below all .gitignore files. Personal excludes and the index are not read, so a tracked file is left
out, too, if a pattern matches it.
"""

from pathlib import Path

from pathspec import GitIgnoreSpec, RegexPattern

from fireflyer.errors import WorkspaceError

NAME = ".gitignore"


class Rules:
    """Rules in force in one directory; the root's rules have no parent."""

    def __init__(self, prefix: str, spec: GitIgnoreSpec | None, parent: "Rules | None") -> None:
        self._prefix = prefix
        self._spec = spec
        self._parent = parent

    def below(self, prefix: str, file: Path) -> "Rules":
        """Returns the rules of the directory `prefix` ("a/b/"). `file`: path of its .gitignore,
        which may be missing."""
        spec = _read(file)
        return self if spec is None else Rules(prefix, spec, self)

    def leave_out(self, path: str, *, directory: bool) -> bool:
        """Returns whether a name in this directory or deeper is left out.

        Args:
            path: path from the top that the rules were read from, separated by "/".
            directory: True for a directory; patterns that end in "/" match directories only.
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
    """Returns whether a pattern matches this name itself. A match of a directory that contains the
    name does not count, because the caller has already decided about the directory."""
    regex = pattern.regex
    if regex is None:
        return False
    if "ps_d" not in regex.groupindex:  # such as a/**: matches only names below a directory
        return regex.search(name.removesuffix("/")) is not None
    if regex.pattern == "(?P<ps_d>/)":  # matches any directory: */
        return name.endswith("/")
    return regex.fullmatch(name) is not None


def rules_of(root: Path) -> tuple[Rules, str]:
    """Returns the rules in force in a folder, and the folder's path from the top of its repository
    ("" or "a/b/").

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
        raise WorkspaceError(f"{file} has an invalid pattern: {error}") from None

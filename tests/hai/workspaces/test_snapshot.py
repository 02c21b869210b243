"""A folder as git sees it; limits; what is left out is said."""

import os
import socket
import subprocess
from itertools import product
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.draws import cases

from fireflyer.errors import WorkspaceError
from fireflyer.hai.workspaces.snapshot import take


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def names(root: Path) -> set[str]:
    return {e.path for e in take(root).manifest.entries if e.kind != "directory"}


def seen_by_git(root: Path) -> set[str]:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    if not any((folder / ".git").exists() for folder in (root, *root.parents)):
        subprocess.run(["git", "init", "-q"], cwd=root, env=environment, check=True)
    command = ["git", "ls-files", "-z", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, check=True)
    return set(filter(None, done.stdout.decode().split("\0")))


def test_modes_links_and_what_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"a/run.sh": "#!", "b": "x", "out/keep": ""})
    (tmp_path / "a/run.sh").chmod(0o750)
    (tmp_path / "empty").mkdir()
    (tmp_path / "in").symlink_to("a/run.sh")
    (tmp_path / "etc").symlink_to("/etc")
    (tmp_path / "up").symlink_to("../x")
    (tmp_path / "round").symlink_to("round")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "s"))
    found = take(tmp_path)
    assert [(e.path, e.kind, e.mode) for e in found.manifest.entries if e.path[0] != "o"] == [
        ("a", "directory", (tmp_path / "a").stat().st_mode & 0o777),
        ("a/run.sh", "file", 0o750),
        ("b", "file", (tmp_path / "b").stat().st_mode & 0o777),
        ("empty", "directory", (tmp_path / "empty").stat().st_mode & 0o777),
        ("in", "link", 0),
    ]
    assert found.left_out == (
        "s is neither a file nor a directory nor a link",
        "etc -> /etc leads outside",
        "round -> round leads outside",
        "up -> ../x leads outside",
    )


def test_too_large_names_the_largest(tmp_path: Path) -> None:
    write(tmp_path, {"data.bin": "x" * 3000, "code.py": "x" * 10})
    with pytest.raises(
        WorkspaceError, match=r"1\.0 KiB; the largest: data\.bin \(2\.9 KiB\), code"
    ):
        take(tmp_path, 1024)
    (tmp_path / ".gitignore").write_text("*.bin\n")
    assert {e.path for e in take(tmp_path, 1024).manifest.entries} == {".gitignore", "code.py"}


def test_the_platform_s_own_folder_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"a": "", "home/token": "secret"})
    assert [e.path for e in take(tmp_path, without=tmp_path / "home").manifest.entries] == ["a"]


def test_rules_of_the_repository_above_and_of_its_exclude_file(tmp_path: Path) -> None:
    write(
        tmp_path, {".gitignore": "*.log\n/sub/top\n", "sub/.gitignore": "!keep.log\n", "sub/x": ""}
    )
    write(tmp_path, {"sub/a.log": "", "sub/keep.log": "", "sub/top": "", "sub/private": ""})
    assert seen_by_git(tmp_path)
    (tmp_path / ".git/info/exclude").write_text("private\n")
    assert names(tmp_path / "sub") == {".gitignore", "x", "keep.log"}
    assert names(tmp_path / "sub") == seen_by_git(tmp_path / "sub")


PATTERNS = st.sampled_from(
    ["a", "/a", "a/", "*.o", "!x.o", "**/b", "a/**", "!a/b", "b/*", "!b/x.o", "[ab]", "a/b/", "#a",
     r"\#a", "*", "!*/", "!.gitignore", "?", "**", "a/**/x.o", "/*", "!/b", " a", "a ", r"\!a", "x.[!p]"]
)  # fmt: skip
NAMES = ["a", "b", "x.o", "x.p", "#a", "!a", "deep"]


@example(["**/b", "!/b"], [], [])
@example(["a/**"], ["!x.o"], [])
@settings(max_examples=cases(60), deadline=None)
@given(
    st.lists(PATTERNS, max_size=5), st.lists(PATTERNS, max_size=3), st.lists(PATTERNS, max_size=2)
)
def test_as_git_does(
    tmp_path_factory: pytest.TempPathFactory, top: list[str], in_a: list[str], in_b: list[str]
) -> None:
    root = tmp_path_factory.mktemp("repo")
    for outer, inner in product("ab", "bd"):
        write(root, {f"{outer}/{inner}/{name}": "" for name in NAMES})
    write(root, {f"a/{name}": "" for name in ("x.o", "x.p", "#a")})
    write(root, dict.fromkeys(("x.o", "x.p", "#a", "!a"), ""))
    for where, patterns in ((".", top), ("a", in_a), ("b/b", in_b)):
        if patterns:
            (root / where / ".gitignore").write_text("\n".join(patterns) + "\n")
    assert names(root) == seen_by_git(root)

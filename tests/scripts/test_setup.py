"""Set-up names a missing tool in one line with the command that installs it; the checks check."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "mkdir", "dirname", "python3", "c++", "make")
INSTALLS = {"c++": "apt-get install g++", "make": "apt-get install make", "python3": "python3-venv"}


@pytest.mark.parametrize("missing", sorted(INSTALLS))
def test_a_missing_tool_is_named_with_its_package(tmp_path: Path, missing: str) -> None:
    for tool in TOOLS:
        found = shutil.which(tool)
        if tool != missing and found is not None:
            (tmp_path / tool).symlink_to(found)
    done = subprocess.run(
        [shutil.which("bash") or "bash", "scripts/setup.sh"],
        cwd=ROOT,
        env={"PATH": str(tmp_path), "HOME": os.environ.get("HOME", "/")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert f"'{missing}' is missing" in done.stderr
    assert INSTALLS[missing] in done.stderr


def test_long_files_and_functions_are_found(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "long.cpp").write_text("\n" * 601)
    (tmp_path / "deep.py").write_text("def f() -> None:\n" + "    x = 1\n" * 80)
    (tmp_path / "fine.py").write_text("def f() -> None:\n" + "    x = 1\n" * 79)
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/sizes.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "deep.py:1: f has 81 lines",
        "long.cpp: 601 lines (at most 600)",
    ]


def test_names_without_their_headers_are_found(tmp_path: Path) -> None:
    native = tmp_path / "native" / "base"
    native.mkdir(parents=True)
    (native / "a.hpp").write_text("#include <vector>\n")
    (native / "b.hpp").write_text('#include "base/a.hpp"\n')
    (native / "fine.cpp").write_text('#include "base/b.hpp"\nstd::vector<int> v;  // std::map\n')
    (native / "wrong.cpp").write_text('#include "base/b.hpp"\nstd::vector<std::string> v;\n')
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/includes.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["native/base/wrong.cpp: #include <string>"]

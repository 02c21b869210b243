"""Which scripts are forked from a process that has torch: by their text, or by what was seen of them."""

import subprocess
import sys
from pathlib import Path

import pytest

from fireflyer.hai.supervisor.imports import MARK, has_loaded_torch, imports_torch, start_of


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"s.py": "print('hi')"}, False),
        ({"s.py": "import json, os.path\nfrom collections import abc"}, False),
        ({"s.py": "import torch"}, True),
        ({"s.py": "import numpy, torch.nn as nn"}, True),
        ({"s.py": "def main():\n    from torch.utils import data"}, True),
        ({"s.py": "from fireflyer import haiscale"}, True),
        ({"s.py": "from fireflyer.checkpoint import CheckpointManager"}, True),
        ({"s.py": "from fireflyer import hai\nimport fireflyer.ffrecord"}, False),
        ({"s.py": "from fireflyer.ffrecord import torch"}, True),
        ({"s.py": "import torchlike"}, False),
        ({"s.py": "import model", "model.py": "import torch"}, True),
        ({"s.py": "import model", "model.py": "import s, sub.deep", "sub/deep.py": ""}, False),
        (
            {"s.py": "from sub import deep", "sub/__init__.py": "", "sub/deep.py": "import torch"},
            True,
        ),
        ({"s.py": "import sub.deep", "sub/__init__.py": "import torch", "sub/deep.py": ""}, True),
        (
            {"s.py": "import sub", "sub/__init__.py": "from . import x", "x.py": "import torch"},
            True,
        ),
        ({"s.py": "import other", "sub/other.py": "import torch"}, False),
        ({"s.py": "import torch ("}, False),
        ({"s.py": "import torch\0"}, False),
        ({}, False),
    ],
)
def test_a_script_says_by_its_text_whether_it_imports_torch(
    files: dict[str, str], expected: bool, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert imports_torch(str(tmp_path / "s.py")) is expected


def test_what_an_earlier_attempt_loaded_counts(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("import plugins")
    assert start_of(str(script), tmp_path) == "exec"
    (tmp_path / MARK).touch()
    assert start_of(str(script), tmp_path) == "fork"


def test_a_process_that_maps_the_library_has_loaded_it(tmp_path: Path) -> None:
    library = tmp_path / "libtorch_cpu.so"
    library.write_bytes(bytes(4096))
    hold = "import mmap, sys\nf = open(sys.argv[1])\nm = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)\n"
    hold += "print(flush=True)\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(library)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert has_loaded_torch(process.pid)
        process.communicate()
    assert not has_loaded_torch(process.pid)

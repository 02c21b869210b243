"""What a killed demo left behind is ended and removed by the next one; what lives or was kept stays."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from fireflyer.demo import processes, runs

DEMO = """
import os, pathlib, signal, subprocess, sys
from fireflyer.demo import processes, runs
with runs.new(pathlib.Path(sys.argv[1])) as folder:
    os.environ[processes.MARK] = str(folder)
    server = [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"]
    with subprocess.Popen(server, stdout=subprocess.PIPE, start_new_session=True) as process:
        process.stdout.readline()
        print(folder, flush=True)
        signal.pause()
"""


def test_a_killed_demo_is_cleaned_up_and_a_living_one_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", DEMO, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        folder = Path(demo.stdout.readline().strip())
        (server,) = (p for p in processes.marked(str(folder)) if p.pid != demo.pid)
        assert runs.sweep(tmp_path) == []
        assert folder.is_dir()
        demo.send_signal(signal.SIGKILL)
    assert [p.pid for p in processes.marked(str(folder))] == [server.pid]
    assert runs.sweep(tmp_path) == [folder]
    assert processes.outliving([server], 0) == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_kept_stays(tmp_path: Path) -> None:
    with runs.new(tmp_path) as folder:
        (folder / "log").write_text("x")
        assert runs.sweep(tmp_path) == []  # even this process does not hold the lock twice
    assert runs.sweep(tmp_path) == []
    assert os.listdir(folder) == ["log"]


def test_a_folder_that_is_removed_in_its_block_is_no_error(tmp_path: Path) -> None:
    with runs.new(tmp_path) as folder:
        (folder / "running").unlink()
        folder.rmdir()
    assert list(tmp_path.iterdir()) == []

"""Share of the step time that haiprof accounts for, in the examples, a plain loop and a compiled one.

`python -m tests.haiprof.covered [--callbacks] [NAME...]` prints one line a script. `--callbacks`: with the
Python of build/callbacks, which has Lightning and transformers. Rank 0 is profiled.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PACKAGES = ROOT / "build" / "callbacks" / "bin" / "python"
SECONDS = "8"

PLAIN = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(6)), nn.Linear(512, 10))
if "compile" in sys.argv:
    model = torch.compile(model)
loss_of, optimizer = nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(8192, 512), torch.randint(10, (8192,))), 128)
for epoch in range(1000):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(epoch, step, loss.item(), file=sys.stderr)
"""
WITHOUT_PACKAGES: dict[str, tuple[int, list[str]]] = {
    "plain": (1, []), "compile": (1, ["compile"]), "gpt": (1, ["--steps", "100000"]),
    "gpt-2": (2, ["--steps", "100000"]), "gpt-fsdp": (2, ["--steps", "100000", "--parallel", "fsdp"]),
    "torch_ddp": (2, []),
    "llama_pipeline": (4, ["--steps", "100000"]), "moe_gpt": (2, ["--steps", "100000"]),
}  # fmt: skip
"""Ranks and arguments by name; up to a hyphen it is that of an example."""

OF_PACKAGES: dict[str, tuple[int, list[str]]] = {
    "hf_trainer": (1, ["--epochs", "100"]), "hf_accelerate": (1, ["--epochs", "1000"]),
    "hf_transformers": (1, ["--steps", "100000"]), "hf_pipeline": (2, ["--steps", "100000"]),
    "lightning_module": (1, ["--epochs", "1000"]), "digits_cnn": (1, ["--epochs", "400"]),
}  # fmt: skip


def measure(name: str, ranks: int, words: list[str], python: str) -> dict[str, object]:
    """Returns the JSON report of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        script = EXAMPLES / f"{name.partition('-')[0]}.py"
        if not script.exists():
            script = Path(folder, "plain.py")
            script.write_text(PLAIN)
        elif name not in ("torch_ddp", "llama_pipeline"):
            words = ["--directory", f"{folder}/out", *words]
        profiler = [
            "-m",
            "fireflyer.cli.prof",
            "run",
            "--time",
            SECONDS,
            "--output",
            f"{folder}/prof",
        ]
        children = []
        for rank in range(ranks):
            environment = {
                **os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }  # fmt: skip
            line = [python, *([] if rank else profiler), str(script), *words]
            children.append(
                subprocess.Popen(
                    line, cwd=folder, env=environment, stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE, process_group=0,
                )
            )  # fmt: skip
        profile = Path(folder, "prof", "report.html")
        while not profile.exists() and children[0].poll() is None:
            with suppress(subprocess.TimeoutExpired):
                children[0].wait(0.2)
        for child in children:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        errors = b"".join(child.communicate()[1] for child in children)
        report = [python, "-m", "fireflyer.cli.prof", "report", f"{folder}/prof", "--json"]
        done = subprocess.run(report, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr}\n{errors.decode()[-2000:]}")
        found: dict[str, object] = json.loads(done.stdout)
        return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--callbacks", action="store_true")
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    table = OF_PACKAGES if asked.callbacks else WITHOUT_PACKAGES
    for name in asked.names or table:
        ranks, words = table[name]
        found = measure(name, ranks, words, str(PACKAGES) if asked.callbacks else sys.executable)
        phases = found["phases"]
        assert isinstance(phases, dict)
        shown = " ".join(f"{key}={1e3 * value:.2f}" for key, value in phases.items())
        print(
            f"{name:18} covered {found['covered']:.2%} of {found['steps']} steps of "
            f"{1e3 * float(str(found['step_s'])):.2f} ms: {shown}",
            flush=True,
        )


if __name__ == "__main__":
    main()

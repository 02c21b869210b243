"""The scripts in examples/ run as their first lines say, on one rank and on two, and learn the same."""

import contextlib
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which optimizers import: once here, not in each forked rank
import torch.distributed.run
from tests.conftest import Gang, StartGang
from tests.waiting import LIMIT_S

import fireflyer.demo.gpt
import fireflyer.haiscale.fsdp  # noqa: F401  # both for the ranks, too
from fireflyer.checkpoint import CheckpointManager
from fireflyer.checkpoint.formats import safetensors

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PACKAGES = ROOT / "build" / "callbacks" / "bin" / "python"
SMALL = ["--steps", "30", "--batch", "16", "--context", "64", "--shape", "64", "2", "4"]


def test_an_ordinary_ddp_script_runs_on_two_ranks(shell: Any) -> None:
    done = shell.run("run", "--ranks", "2", str(EXAMPLES / "torch_ddp.py"))
    lines = done.stdout.splitlines()
    assert len(lines) == 5, done.stdout + done.stderr
    first, last = (float(line.rsplit(" ", 1)[1]) for line in (lines[0], lines[-1]))
    assert all("2 ranks" in line for line in lines)
    assert last < first


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_are_short(script: Path) -> None:
    assert len(script.read_text().splitlines()) <= 120


class Ranks:
    """Forked ranks of examples/gpt.py; the first one's standard output is a pipe."""

    def __init__(self, start_gang: StartGang, world: int, directory: Path, *flags: str) -> None:
        out, into = os.pipe()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])

        def body(rank: int, _world: int) -> None:
            os.environ.update(MASTER_PORT=port, LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
            if rank == 0:
                os.dup2(into, 1)
                sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
            sys.argv = ["gpt.py", "--directory", str(directory), *SMALL, *flags]
            runpy.run_path(str(EXAMPLES / "gpt.py"), run_name="__main__")

        self.gang: Gang = start_gang(body, world)
        os.close(into)
        self._out = os.fdopen(out)
        self.lines: list[str] = []

    def until(self, text: str) -> None:
        for line in self._out:
            self.lines.append(line)
            if text in line:
                return
        raise AssertionError(f"it ended without {text!r}: {self.lines}")

    def kill(self) -> None:
        for rank in range(len(self.gang.pids)):
            self.gang.kill(rank)
        self._out.close()

    def end(self) -> dict[int, float]:
        """The losses by step."""
        with self._out:
            self.lines += self._out
        self.gang.results()
        return losses("".join(self.lines))


def losses(printed: str, unit: str = "step") -> dict[int, float]:
    found = re.findall(rf"^{unit} (\d+) of \d+: loss ([0-9.]+), .*/s$", printed, re.MULTILINE)
    return {int(number): float(loss) for number, loss in found}


def same_bits(one: Any, other: Any) -> bool:
    ours, others = (torch.utils._pytree.tree_leaves_with_path(x) for x in (one, other))
    return len(ours) == len(others) and all(
        at == there and (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)
        for (at, a), (there, b) in zip(ours, others, strict=True)
    )


def assert_alike(some: dict[int, float], others: dict[int, float]) -> None:
    assert some.keys() == others.keys()
    assert all(abs(loss - others[step]) < 2e-3 for step, loss in some.items()), (some, others)


@pytest.mark.full
def test_gpt_learns_the_same_by_python_torchrun_and_fireflyer_run(
    shell: Any, start_gang: StartGang, tmp_path: Path
) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    script = str(EXAMPLES / "gpt.py")
    torchrun = ["-W", "default", "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    commands = (
        [script, "--directory", "python"],
        [*torchrun, script, "--directory", "torchrun", "--parallel", "fsdp", "--accumulate", "2"],
    )
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, *command, *SMALL],
                    cwd=tmp_path,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for command in commands
        ]
        how = ["--directory", str(tmp_path / "ddp"), *SMALL, "--accumulate", "2", "--wire", "bf16"]
        ddp = losses(shell.run("run", "--ranks", "2", script, *how).stdout)
        zero_2 = Ranks(start_gang, 2, tmp_path / "2", "--parallel", "fsdp", "--zero", "2").end()
        (alone, said), (sharded, told) = (run.communicate(timeout=LIMIT_S) for run in runs)
    assert [run.returncode for run in runs] == [0, 0], said + told
    assert "model flops utilization" in alone
    assert ddp.keys() == {10, 20, 30}
    assert ddp[30] < ddp[10] - 0.5
    for others in (losses(alone), losses(sharded), zero_2):
        assert_alike(ddp, others)
    out = ["--to", "safetensors", "--root", "model"]
    weights = tmp_path / "model.safetensors"
    shell.run("ckpt", "export", str(tmp_path / "ddp"), str(weights), *out)
    assert "embedding.weight" in safetensors.load(weights)


@pytest.mark.full
def test_gpt_killed_half_way_ends_as_if_it_had_not_been(
    start_gang: StartGang, tmp_path: Path
) -> None:
    whole = Ranks(start_gang, 2, tmp_path / "whole", "--save-every", "8").end()
    broken = Ranks(start_gang, 2, tmp_path / "broken", "--save-every", "8")
    broken.until("step 20")
    broken.kill()
    saved = CheckpointManager(tmp_path / "broken").latest()
    assert saved in (8, 16, 24)
    again = Ranks(start_gang, 2, tmp_path / "broken", "--save-every", "8").end()
    assert again == {step: loss for step, loss in whole.items() if step > saved}
    ends = [CheckpointManager(tmp_path / name).load() for name in ("whole", "broken")]
    assert same_bits(*ends)
    assert Ranks(start_gang, 2, tmp_path / "broken", "--save-every", "8").end() == {}


def test_a_batch_that_cannot_be_divided_is_refused(start_gang: StartGang, tmp_path: Path) -> None:
    ranks = Ranks(start_gang, 2, tmp_path, "--accumulate", "3")
    with pytest.raises(SystemExit, match="multiple of 2 ranks x 3 parts"):
        ranks.end()


def run_with_packages(shell: Any, *arguments: str) -> str:
    """`fireflyer run` with two ranks where scikit-learn, transformers and Lightning are installed."""
    if not PACKAGES.exists():
        pytest.skip(
            "no scikit-learn, transformers, Lightning: scripts/setup.sh --all-test-packages"
        )
    shell.env |= {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "default"}
    script, *flags = arguments
    done = shell.run("run", "--ranks", "2", str(EXAMPLES / script), *flags, python=PACKAGES)
    return str(done.stdout)


@pytest.mark.full
def test_digits_are_read_after_eight_epochs(shell: Any) -> None:
    printed = run_with_packages(shell, "digits_cnn.py")
    reached = re.findall(r"^epoch 8 of 8: .* test accuracy ([0-9.]+),", printed, re.MULTILINE)
    assert [float(one) > 0.95 for one in reached] == [True], printed


@pytest.mark.full
def test_a_llama_learns_sharded_as_replicated_and_is_saved(shell: Any) -> None:
    flags = ["--steps", "20", "--batch", "16", "--context", "64", "--hidden", "64"]
    sharded = losses(run_with_packages(shell, "hf_transformers.py", *flags, "--parallel", "fsdp"))
    script: list[str | Path] = [
        PACKAGES,
        EXAMPLES / "hf_transformers.py",
        "--directory",
        "alone",
        *flags,
    ]
    environment = {**shell.env, "OMP_NUM_THREADS": "1"}
    alone = subprocess.run(
        script, cwd=shell.folder, env=environment, stdout=subprocess.PIPE, text=True, timeout=240
    )
    assert_alike(losses(alone.stdout), sharded)
    assert sharded[20] < sharded[10] < 5
    [saved] = shell.home.glob("tasks/*/output/llama/model/model.safetensors")
    assert saved.stat().st_size == (shell.folder / "alone/model/model.safetensors").stat().st_size


@pytest.mark.full
def test_a_llama_learns_in_a_pipeline_as_in_replicas_and_is_saved_whole(shell: Any) -> None:
    flags = ["--steps", "20", "--batch", "16", "--directory"]
    divided = run_with_packages(shell, "hf_pipeline.py", *flags, "two", "--stages", "2")
    replicated = run_with_packages(shell, "hf_pipeline.py", *flags, "one", "--stages", "1")
    assert "2 stages" in divided
    assert_alike(losses(replicated), losses(divided))
    assert losses(divided)[20] < losses(divided)[10] < 5
    one, two = (CheckpointManager(shell.folder / name).load()["model"] for name in ("one", "two"))
    assert set(one) == set(two)


@pytest.mark.full
def test_a_lightning_module_learns_over_hfreduce(shell: Any) -> None:
    printed = run_with_packages(shell, "lightning_module.py", "--epochs", "3")
    reached = re.findall(
        r"^epoch \d of 3: .* validation accuracy ([0-9.]+),", printed, re.MULTILINE
    )
    assert len(reached) == 3, printed
    assert float(reached[-1]) > 0.9


@pytest.mark.full
def test_the_trainer_of_hugging_face_trains_over_hfreduce(shell: Any) -> None:
    flags = ["--epochs", "0.1", "--context", "64", "--hidden", "64"]
    printed = run_with_packages(shell, "hf_trainer.py", *flags)
    learned = [float(loss) for loss in re.findall(r"'loss': '?([0-9.]+)", printed)]
    assert len(learned) >= 3, printed
    assert learned[-1] < learned[0]
    assert list(shell.home.glob("tasks/*/output/trainer/model/model.safetensors"))


@pytest.mark.full
def test_accelerate_trains_over_hfreduce(shell: Any) -> None:
    printed = run_with_packages(shell, "hf_accelerate.py", "--epochs", "3")
    reached = re.findall(r"^epoch \d of 3: .* accuracy ([0-9.]+)$", printed, re.MULTILINE)
    assert len(reached) == 3, printed
    assert float(reached[-1]) > 0.9


def run_alone(shell: Any, python: str | Path, script: str, *flags: str) -> str:
    """A script in a process of its own, without the platform."""
    environment = {**shell.env, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [str(python), str(EXAMPLES / script), *flags]
    done = subprocess.run(
        command, cwd=shell.folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_digits_are_read_with_few_bits(shell: Any) -> None:
    if not PACKAGES.exists():
        pytest.skip("no scikit-learn: scripts/setup.sh --all-test-packages")
    printed = run_alone(shell, PACKAGES, "low_bit_digits.py", "--epochs", "8")
    [reached] = re.findall(r"^epoch 8 of 8: .* test accuracy ([0-9.]+)$", printed, re.MULTILINE)
    assert float(reached) > 0.95


@pytest.mark.full
def test_characters_are_learnt_with_few_bits(shell: Any) -> None:
    printed = run_alone(
        shell, sys.executable, "low_bit_characters.py", "--steps", "60", "--width", "32"
    )
    found = dict(re.findall(r"^(\S+): perplexity ([0-9.]+)", printed, re.MULTILINE))
    assert list(found) == ["float32", "plain", "balanced"]
    assert all(float(perplexity) < 40 for perplexity in found.values())


@pytest.mark.full
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_hugging_face_model_trains_to_the_same_losses(shell: Any, model: str) -> None:
    if not PACKAGES.exists():
        pytest.skip("no transformers: scripts/setup.sh --all-test-packages")
    printed = run_alone(shell, PACKAGES, "hf_to_hfai.py", "--model", model, "--steps", "5")
    [share] = re.findall(r"after to_hfai \(([0-9.]+)x\)$", printed, re.MULTILINE)
    assert float(share) < 0.85
    assert printed.endswith("the losses are equal\n")


@pytest.mark.full
def test_prompts_are_answered_by_the_experts_that_they_name(shell: Any) -> None:
    if not PACKAGES.exists():
        pytest.skip("no transformers: scripts/setup.sh --all-test-packages")
    printed = run_alone(
        shell, PACKAGES, "serve_experts.py", "--prompts", "12", "--tokens", "3", "--check"
    )
    assert len(re.findall(r"^expert-\d: waited", printed, re.MULTILINE)) == 12
    assert "0 answers differ from those of the models themselves" in printed

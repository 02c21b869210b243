"""The planner against the paper's points and against numbers worked out by hand."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fireflyer.errors import ConfigError
from fireflyer.haiscale.planner.costs import calibrated, plan
from fireflyer.haiscale.planner.presets import (
    CLUSTERS,
    PAPER,
    Cluster,
    Layout,
    Model,
    layout_of,
    read,
)
from fireflyer.haiscale.planner.search import reason, search

FIRE_FLYER = CLUSTERS["fire-flyer"]
SMALL = Model(
    layers=8, hidden=16, heads=2, parameters=8e6, active=8e6, sequence=32, batch=64, efficiency=0.5
)
NODES = Cluster(gpus_per_node=2, flops=1e12, memory=1e9, card=1e9, allreduce=1e8)


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_points_lie_within_ten_percent(name: str) -> None:
    model = calibrated(name)
    errors = [
        plan(model, FIRE_FLYER, Layout(pp=model.pp, dp=gpus // model.pp)).step_s / measured - 1
        for gpus, measured in PAPER[name]
    ]
    assert abs(errors[0]) < 1e-6, "calibrated on it"
    assert max(map(abs, errors)) <= 0.1


def test_bytes_and_memory_are_those_worked_out_by_hand() -> None:
    found = plan(SMALL, NODES, Layout(pp=2, dp=2))
    message, batches = 32 * 16 * 2, 32
    # Staggered: both pipelines cross the cards; each dp group lies on one host.
    assert found.bytes_per_nic == 2 * message * batches
    assert found.allreduce_s == 0
    assert found.memory_bytes["parameters"] == 8e6
    assert found.memory_bytes["optimizer"] == 8e6 / 2 * 12 / 2
    compact = plan(SMALL, NODES, Layout(pp=2, dp=2, placement="compact"))
    # Compact: two dp groups cross the cards, 8e6 bytes of gradients each, on two hosts.
    assert compact.bytes_per_nic == 2 * 8e6
    assert compact.allreduce_s == 8e6 / 1e8


def test_bubble_is_the_formulas_share() -> None:
    found = plan(SMALL, NODES, Layout(pp=2, dp=2))
    assert found.bubble * found.step_s == pytest.approx(found.compute_s / 32)
    zero = plan(SMALL, NODES, Layout(pp=2, dp=2, schedule="zb-h1"))
    assert zero.bubble * zero.step_s == pytest.approx(found.compute_s / 32 / 3)


def test_search_ranks_what_fits_and_says_why() -> None:
    plans, others = search(calibrated("llama-13b"), FIRE_FLYER, 64)
    assert [one.step_s for one in plans] == sorted(one.step_s for one in plans)
    assert all(one.memory <= FIRE_FLYER.memory for one in plans)
    assert others > 0, "13e9 parameters do not fit one GPU"
    assert min(one.layout.pp for one in plans) > 1
    assert plans[0].layout.text() in reason(plans, others)
    with pytest.raises(ConfigError, match="no layout of 1 GPUs fits"):
        search(calibrated("llama-13b"), FIRE_FLYER, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pp=3,dp=16", "is not 64 GPUs"),
        ("pp", "expected KEY=VALUE"),
        ("pp=4,pp=4", "at most once"),
        ("depth=4", "expected KEY=VALUE"),
        ("pp=four", "Expected `int`"),
        ("pp=0", "invalid --layout"),
    ],
)
def test_invalid_layouts_are_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        layout_of(text, calibrated("llama-13b"), 64)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(pp=2, dp=3), "does not divide the batch"),
        (Layout(pp=16, dp=1), "16 stages for 8 layers"),
        (Layout(pp=4, dp=32), "invalid chunks 2: 1f1b"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(layout: Layout, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(SMALL, NODES, layout)


def printed(*arguments: str) -> Any:
    command = [sys.executable, "-m", "fireflyer.haiscale.planner", "train", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_prints_one_object(tmp_path: Path) -> None:
    done = printed("--preset", "llama-13b", "--gpus", "64", "--layout", "pp=4,dp=16", "--json")
    found = json.loads(done.stdout)
    assert found["step_s"] == pytest.approx(64.118)
    assert {"bubble", "memory_bytes", "bytes_per_nic"} <= set(found)
    assert set(found["memory_bytes"]) == {"parameters", "gradients", "optimizer", "activations"}
    ours = tmp_path / "model.toml"
    fields = {name: getattr(SMALL, name) for name in SMALL.__struct_fields__}
    ours.write_text("\n".join(f"{name} = {value}" for name, value in fields.items()))
    done = printed("--preset", str(ours), "--gpus", "4", "--search", "--json")
    found = json.loads(done.stdout)
    assert found["layouts"][0]["step_s"] == found["step_s"]
    assert found["why"].endswith("memory.")


def test_an_unknown_model_is_one_line() -> None:
    done = printed("--preset", "gpt-9", "--gpus", "4")
    assert done.returncode != 0
    assert "invalid --preset 'gpt-9': expected llama-13b" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [("flops = 1", "expected TOML with"), ("[[", "expected TOML with"), ("", "expected TOML")],
)
def test_invalid_files_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "nodes.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read("--cluster", str(path), CLUSTERS, Cluster)
    path.write_text("gpus_per_node=8\nflops=1e12\nmemory=1e9\ncard=0.0\nallreduce=1e9")
    with pytest.raises(ConfigError, match="expected card above 0"):
        read("--cluster", str(path), CLUSTERS, Cluster)

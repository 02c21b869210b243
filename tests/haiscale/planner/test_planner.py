"""The planner against the paper's points and against numbers worked out by hand."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
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
    assert compact.allreduce_s == 2 * 8e6 / 1e8


def test_shares_of_layers_and_experts_are_those_worked_out_by_hand() -> None:
    model = msgspec.structs.replace(SMALL, experts=4, top_k=1, expert_parameters=4e6)
    whole = plan(model, NODES, Layout(pp=1, dp=4))
    found = plan(model, NODES, Layout(pp=1, dp=4, ep=4))
    assert found.memory_bytes["parameters"] == 2 * (4e6 + 4e6 / 4)
    assert found.memory_bytes["optimizer"] == whole.memory_bytes["optimizer"] == 12 * 8e6 / 4
    # A token goes to the other host with probability 1/2, there and back, in both passes.
    routed = 2 * 2 * 0.5 * 32 * 16 * 2 * 8
    dense = 2 * 2 * 4e6 * (2 - 1) / 2
    assert found.bytes_per_nic == 2 * routed * 16 + dense
    # Each expert exists once. 4 buckets of 2 layers; the line rests until the first one is ready.
    backward = 2 / 3 * (found.compute_s + found.exchange_s) / 16
    assert found.allreduce_s == pytest.approx(2 * 4e6 / 1e8 - 3 / 4 * backward)
    inside = 2 * (3 * 0.25 - 0.5) * 32 * 16 * 2 * 8 / NODES.bus
    assert found.exchange_s == pytest.approx(16 * 2 * (inside + routed / NODES.card))
    split = plan(SMALL, NODES, Layout(pp=1, dp=2, tp=2))
    assert split.memory_bytes["parameters"] == 8e6
    assert split.compute_s == pytest.approx(plan(SMALL, NODES, Layout(pp=1, dp=4)).compute_s)
    assert split.bytes_per_nic == 2 * 2 * 8e6 * (2 - 1) / 2, "two groups, half of the gradients"
    sums = 2 * 2 * 0.5 * 32 * 16 * 2 * 8 / NODES.pair
    assert split.exchange_s == pytest.approx(32 * 2 * sums)


def test_only_the_last_bucket_of_slow_layers_shows() -> None:
    slow = msgspec.structs.replace(SMALL, efficiency=1e-4)
    found = plan(slow, NODES, Layout(pp=1, dp=4))
    assert found.allreduce_s == pytest.approx(2 * 8e6 / 1e8 / 4)
    assert found.step_s == pytest.approx(found.compute_s + found.allreduce_s)


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
    assert min(one.layout.pp * one.layout.tp for one in plans) > 1
    assert {one.layout.tp for one in plans} == {1, 2, 4, 8}
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
        ("pp=4,dp=16,tp=2", "pp 4 times dp 16 times tp 2 is not 64 GPUs"),
    ],
)
def test_invalid_layouts_are_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        layout_of(text, calibrated("llama-13b"), 64)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(pp=2, dp=3), "does not divide the batch"),
        (Layout(pp=1, dp=4, tp=4), "tp 4 does not divide 2 heads"),
        (Layout(pp=1, dp=4, ep=2), "or the model has no experts"),
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


def test_the_page_shows_every_rank_and_needs_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    layout = "pp=4,dp=8,tp=2,schedule=zb-h1"
    done = printed("--preset", "llama-13b", "--gpus", "64", "--layout", layout, "--html", str(path))
    assert done.returncode == 0, done.stderr
    page = path.read_text()
    assert done.stdout.split(": ", 1)[1].strip() in page, "the same numbers"
    assert "8 of 512 micro-batches" in page
    assert all(f"rank {rank}<" in page for rank in range(4))
    boxes = re.findall(r"<title>(forward|input gradient|weight gradient) of micro-batch", page)
    assert {kind: boxes.count(kind) for kind in set(boxes)} == {
        "forward": 4 * 8,
        "input gradient": 4 * 8,
        "weight gradient": 4 * 8,
    }
    assert not re.search(r"(src|href)=|<script|url\((?!#)", page), "self-contained"


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

"""Trace readers: what real exports contain is read or left out by name, damage is refused with its line."""

import gzip
import random
from pathlib import Path

import pytest

from fireflyer.errors import TraceError
from fireflyer.hai.simulation.readers import parse, read
from fireflyer.hai.simulation.trace import head, with_users

PHILLY = """timestamp,duration,num_gpus,gpu_time,cluster
2017-10-09 07:01:55,66.0,1,66.0,11cb48

2017-10-09 07:00:00,2951.5,8,23612.0,6214e9
2017-10-09 07:00:00,1.0,2,2.0,6214e9
2017-10-09 07:00:00,5.0,0,0.0,6214e9
"""

SACCT = """JobID|JobName|User|Account|Submit|ElapsedRaw|AllocTRES|NNodes|State
101|train|ada|vision|2026-03-01T10:00:00|3600|billing=8,cpu=64,gres/gpu=16,gres/gpu:a100=16,node=2|2|COMPLETED
101.batch|batch||vision|2026-03-01T10:00:00|3600|cpu=32,gres/gpu=8,node=1|1|COMPLETED
101.0|python||vision|2026-03-01T10:00:05|3590|cpu=64,gres/gpu=16,node=2|2|COMPLETED
102_7|sweep|bob|nlp|2026-03-01T09:30:00|60|cpu=4,gres/gpu:h100=1,node=1|1|CANCELLED by 1001
103|a|b name|bob|nlp|2026-03-01T11:00:00|10|gres/gpu=1|1|FAILED
104|wait|bob|nlp|2026-03-01T11:00:00|0||1|PENDING
105|cpu|bob|nlp|2026-03-01T11:00:00|50|cpu=4,node=1|1|COMPLETED
106|long|bob|nlp|2026-03-01T11:00:00|500|gres/gpu=1|1|RUNNING
"""

SWF = """; Version: 2.2
; MaxNodes: 128
1 0 5 100 4 -1 -1 4 -1 -1 1 3 1 -1 1 -1 -1 -1
2 10 -1 -1 4 -1 -1 4 -1 -1 0 3 1 -1 1 -1 -1 -1
3 20 5 50 -1 -1 -1 16 -1 -1 1 7 -1 -1 2 -1 -1 -1
4 30 5 0 2 -1 -1 2 -1 -1 5 7 -1 -1 2 -1 -1 -1
"""

EVENTS = """[
{"seq":1,"task":"t1","attempt":0,"kind":"submitted","detail":{"user":"ada","gpus":4},"monotonic_ns":1,"wall":100.0},
{"seq":2,"task":"t1","attempt":1,"kind":"starting","detail":{"nodes":["n0","n1"]},"monotonic_ns":2,"wall":101.0},
{"seq":3,"task":"t1","attempt":1,"kind":"running","detail":{},"monotonic_ns":3,"wall":102.0},
{"seq":4,"task":"t2","attempt":0,"kind":"submitted","detail":{},"monotonic_ns":3,"wall":103.0},
{"seq":5,"task":"t1","attempt":1,"kind":"gang_ended","detail":{"outcome":"failed"},"monotonic_ns":4,"wall":112.0},
{"seq":6,"task":"t1","attempt":1,"kind":"queued","detail":{},"monotonic_ns":5,"wall":112.0},
{"seq":7,"task":"t1","attempt":2,"kind":"starting","detail":{"nodes":["n0","n1"]},"monotonic_ns":6,"wall":113.0},
{"seq":8,"task":"t1","attempt":2,"kind":"running","detail":{},"monotonic_ns":7,"wall":115.0},
{"seq":9,"task":"t1","attempt":2,"kind":"gang_ended","detail":{"outcome":"finished"},"monotonic_ns":8,"wall":120.5},
{"seq":10,"task":"t1","attempt":2,"kind":"finished","detail":{},"monotonic_ns":9,"wall":120.5}]
"""


def test_philly_is_sorted_and_counts_from_the_first_arrival() -> None:
    trace = parse(PHILLY, "p.csv")
    assert trace.format == "philly"
    assert [(j.name, j.submit_ms, j.run_ms, j.gpus, j.group) for j in trace.jobs] == [
        ("j4", 0, 2_951_500, 8, "6214e9"),
        ("j5", 0, 1_000, 2, "6214e9"),
        ("j2", 115_000, 66_000, 1, "11cb48"),
    ]
    assert trace.left_out == {"without a GPU": 1}


def test_sacct_takes_jobs_not_steps() -> None:
    trace = parse(SACCT, "s.txt")
    assert trace.format == "sacct"
    assert [(j.name, j.user, j.submit_ms, j.run_ms, j.gpus, j.nodes) for j in trace.jobs] == [
        ("102_7", "bob", 0, 60_000, 1, 1),
        ("101", "ada", 1_800_000, 3_600_000, 16, 2),
        ("103", "bob", 5_400_000, 10_000, 1, 1),
    ]
    assert trace.left_out == {"that never started": 1, "without a GPU": 1, "still running": 1}


def test_sacct_with_the_other_columns_and_a_closing_separator() -> None:
    text = (
        "JobIDRaw|User|Submit|Elapsed|NNodes|\n"
        "7|ada|2026-03-01T10:00:00|1-02:03:04|3|\n"
        "JobIDRaw|User|Submit|Elapsed|NNodes|\n"
        "8|ada|2026-03-01T10:00:00|05:06.789|1|\n"
    )
    jobs = parse(text, "s.txt").jobs
    assert [(j.run_ms, j.gpus, j.nodes) for j in jobs] == [(93_784_000, 0, 3), (306_000, 0, 1)]


def test_sacct_by_start_and_end_and_old_gres() -> None:
    text = (
        "JobID|Submit|Start|End|AllocGRES|NNodes\n"
        "7|2026-03-01T10:00:00|2026-03-01T10:00:10|2026-03-01T10:01:00|gpu:a100:4|2\n"
        "8|2026-03-01T10:00:00|Unknown|Unknown|gpu:4|2\n"
    )
    trace = parse(text, "s.txt")
    assert [(j.run_ms, j.gpus) for j in trace.jobs] == [(50_000, 8)]
    assert trace.left_out == {"that never started": 1}


def test_swf_takes_processors_as_gpus() -> None:
    trace = parse(SWF, "x.swf")
    assert trace.format == "swf"
    assert [(j.name, j.user, j.group, j.submit_ms, j.run_ms, j.gpus) for j in trace.jobs] == [
        ("1", "u3", "g1", 0, 100_000, 4),
        ("3", "u7", "q2", 20_000, 50_000, 16),
    ]
    assert trace.left_out == {"without a run time": 1, "that never started": 1}


@pytest.mark.parametrize("lines", [False, True])
def test_the_platforms_own_events(lines: bool) -> None:
    text = "\n".join(row.strip(",[]") for row in EVENTS.splitlines()) if lines else EVENTS
    trace = parse(text, "events.json")
    assert trace.format == "events"
    [job] = trace.jobs
    assert (job.name, job.user, job.run_ms, job.gpus, job.nodes) == ("t1", "ada", 15_500, 8, 2)
    assert trace.left_out == {"not over yet": 1}


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        (PHILLY.replace("66.0,1,", "x,1,"), 2, "invalid duration 'x': expected a number"),
        (PHILLY.replace("66.0,1,", "nan,1,"), 2, "duration is out of range"),
        (PHILLY.replace("66.0,1,", "-1,1,"), 2, "duration is out of range"),
        (PHILLY.replace("66.0,1,", "66.0,1.5,"), 2, "invalid num_gpus '1.5': expected an integer"),
        (
            PHILLY.replace("2017-10-09 07:01:55", "yesterday"),
            2,
            "invalid timestamp 'yesterday': expected a time",
        ),
        (PHILLY.replace("66.0,1,", "66.0,"), 2, "4 fields, the header has 5"),
        (
            SACCT.replace("|3600|billing", "|soon|billing"),
            2,
            "invalid ElapsedRaw 'soon': expected a number",
        ),
        (SACCT.replace("10:00:00|3600|billing", "10:99:00|3600|billing"), 2, "invalid Submit"),
        (
            SACCT.replace("|2|COMPLETED\n101.batch", "|two|COMPLETED\n101.batch"),
            2,
            "invalid nodes 'two': expected a number",
        ),
        (SACCT.replace("105|cpu|", "105|"), 8, "8 fields, the header has 9"),
        (SWF.replace("1 0 5 100", "1 0 100"), 3, "17 fields"),
        (SWF.replace("1 0 5 100", "1 0 5 1e30"), 3, "run time is out of range"),
        (EVENTS.replace('"wall":100.0', '"wall":"x"'), 1, "not a list of events"),
        ('{"task":"t1"}', 1, "not an event"),
    ],
)
def test_damage_is_refused_with_its_line(text: str, line: int, why: str) -> None:
    with pytest.raises(TraceError, match=f"^t, line {line}: .*{why}"):
        parse(text, "t")


@pytest.mark.parametrize(
    "text", ["", "hello\n", "\x00\x01", "a,b,c\n1,2,3\n", "; only a comment\n"]
)
def test_what_is_no_trace_is_refused(text: str) -> None:
    with pytest.raises(TraceError):
        parse(text, "t")


def test_a_trace_without_a_job_says_why() -> None:
    text = "timestamp,duration,num_gpus\n2017-10-09 07:01:55,66.0,0\n"
    with pytest.raises(TraceError, match="no job that ran on GPUs \\(1 without a GPU\\)"):
        parse(text, "t")


def test_a_header_without_a_needed_column_is_refused() -> None:
    with pytest.raises(TraceError, match="line 1: the header lacks a column Submit"):
        parse("JobID|User|ElapsedRaw|NNodes\n1|a|5|1\n", "t")


def test_files_may_be_packed_and_have_a_byte_order_mark(tmp_path: Path) -> None:
    plain, packed = tmp_path / "p.csv", tmp_path / "p.csv.gz"
    plain.write_text("\ufeff" + PHILLY.replace("\n", "\r\n"))
    packed.write_bytes(gzip.compress(PHILLY.encode()))
    assert read(plain).jobs == read(packed).jobs == parse(PHILLY, "p.csv").jobs
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(TraceError, match="a damaged gzip file"):
        read(packed)


@pytest.mark.parametrize(
    "text", [PHILLY, SACCT, SWF, EVENTS], ids=["philly", "sacct", "swf", "events"]
)
def test_damaged_bytes_give_a_trace_or_an_error_of_ours(text: str) -> None:
    draw = random.Random(1)
    outcomes = set()
    for _ in range(400):
        data = list(text)
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(data))
            match draw.randrange(3):
                case 0:
                    data[place] = draw.choice("|,;\"'{}[]\n\x00 -.:0123456789eE\ufffdx")
                case 1:
                    del data[place]
                case 2:
                    data[place:place] = data[: draw.randrange(80)]
        try:
            trace = parse("".join(data), "t")
        except TraceError:
            outcomes.add("refused")
        else:
            assert all(job.run_ms >= 1 and job.submit_ms >= 0 for job in trace.jobs)
            outcomes.add("read")
    assert outcomes == {"refused", "read"}


def test_users_come_from_a_column() -> None:
    philly, slurm = parse(PHILLY, "p"), parse(SACCT, "s")
    assert [j.user for j in with_users(philly, None).jobs] == ["j4", "j5", "j2"]
    assert [j.user for j in with_users(philly, "cluster").jobs] == ["6214e9", "6214e9", "11cb48"]
    assert [j.user for j in with_users(slurm, None).jobs] == ["bob", "ada", "bob"]
    assert [j.user for j in with_users(slurm, "group").jobs] == ["nlp", "vision", "nlp"]
    with pytest.raises(TraceError, match="does not contain the user"):
        with_users(philly, "user")
    assert [j.name for j in head(philly, 2).jobs] == ["j4", "j5"]

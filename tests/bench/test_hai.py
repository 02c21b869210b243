"""`fireflyer bench hai` measures what it says, once through."""

import json
import subprocess
import sys

from fireflyer.bench.harness import goals


def test_every_figure_is_there() -> None:
    command = [sys.executable, "-m", "fireflyer.bench", "hai", "--rounds", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {(row["case"], row["peer"]): row for row in json.loads(done.stdout)["rows"]}
    allowed = {case: row["peer_value"] for (case, peer), row in rows.items() if peer == "allowed"}
    assert allowed == {
        "engine, from nothing to its rank started": goals.HAI_START_MS,
        "engine, from nothing to its rank's first line": goals.HAI_START_MS,
        "memory of a supervisor, PSS": goals.HAI_MEMORY_MB,
        "memory of a supervisor, RSS": goals.HAI_MEMORY_MB,
        "SIGKILL of a rank, to its record": goals.HAI_DEATH_MS,
        "SIGKILL of a rank, to a client's answer": goals.HAI_DEATH_MS,
        "suspend (local), to nodes free, without the save": goals.HAI_SUSPEND_MS["local"],
    }
    assert {peer for _, peer in rows} == {"allowed", "python alone", "-"}
    assert all(row["ours"] > 0 for row in rows.values())
    pss, rss = (
        rows[f"memory of a supervisor, {kind}", "allowed"]["ours"] for kind in ("PSS", "RSS")
    )
    assert pss <= rss

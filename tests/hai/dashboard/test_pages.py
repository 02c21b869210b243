"""What the pages say, to whom, and that whatever a task calls itself stays text."""

import re
from collections.abc import Callable
from pathlib import Path

from markupsafe import escape
from tests.hai.dashboard.conftest import Tags, Visitor
from tests.hai.server.conftest import Server
from tests.hai.server.http.test_access import Somebody
from tests.waiting import LIMIT_S

from fireflyer import heartbeat
from fireflyer.hai.client.administration import Administration
from fireflyer.hai.home import profile_folder
from fireflyer.hai.model import TaskSpec, TaskState
from fireflyer.hai.model.identity import Quota, TokenRequest

MakeSpec = Callable[..., TaskSpec]
MakeVisitor = Callable[..., Visitor]

PAGES = (
    "/dashboard", "/dashboard/map", "/dashboard/queue", "/dashboard/tasks", "/dashboard/nodes",
    "/dashboard/nodes/n0", "/dashboard/ledger", "/dashboard/users", "/dashboard/use", "/dashboard/tasks/t1",
    "/dashboard/tasks/t1/stop", "/dashboard/tasks/t2",
)  # fmt: skip

HOSTILE = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"
RIGHT_TO_LEFT = "\u202egpj.exe\u2066 שלום"


def check_markup(text: str) -> Tags:
    """One script, that of the server; no style, no handler, no address of another place in a page."""
    tags = Tags(text)
    scripts = [attributes for tag, attributes in tags.tags if tag == "script"]
    assert [set(found) for found in scripts] == [{"src", "defer"}]
    for tag, attributes in tags.tags:
        assert tag not in ("style", "iframe", "object", "embed", "base", "img"), tag
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name != "style", tag
            if name in ("href", "src", "action", "formaction"):
                assert re.match(r"(/dashboard|#|$|data:image/svg)", value or ""), value
    return tags


def lasting(text: str) -> list[str]:
    """The lines of a page that do not say when it was made, nor hold a secret, which may have any letters."""
    return [
        line for line in text.splitlines() if 'id="as-of"' not in line and 'name="csrf"' not in line
    ]


def test_names_reasons_and_logs_are_text(
    server: Server, visitor: MakeVisitor, spec: MakeSpec
) -> None:
    owner = visitor()
    client = server.client
    log = f"</pre>{HOSTILE}\x1b[31mred\x1b[0m \x1b]0;title\x07\x07bell\n{RIGHT_TO_LEFT}\n10%\r20%\rdone\r\n"
    client.submit(spec("say", log, name=HOSTILE, labels={HOSTILE[:60]: RIGHT_TO_LEFT}))
    client.wait("t1", {"running"}, LIMIT_S)
    client.submit(spec("hold", HOSTILE, name=HOSTILE + RIGHT_TO_LEFT + "x" * 120, nodes=2))
    client.drain("n1", HOSTILE, None)
    for path in PAGES:
        answer = owner.get(path)
        assert answer.status == 200, path
        tags = check_markup(answer.text)
        for mark in ("\u202e", "\u2066", "\x1b", "\x07"):
            assert mark not in answer.text, path
        assert len(answer.text) < 40_000, path
        shown = HOSTILE[:25] in tags.text
        others = ("map", "users", "ledger", "use")
        assert shown or path.removeprefix("/dashboard/") in others, path
    page = owner.get("/dashboard/tasks/t1").text
    found = re.search(r'<pre id="log"[^>]*>\n(.*?)</pre>', page, re.DOTALL)
    assert found is not None
    assert found[1] == escape(f"</pre>{HOSTILE}red bell\ngpj.exe שלום\ndone\n")


def test_every_state_has_a_page(server: Server, visitor: MakeVisitor, spec: MakeSpec) -> None:
    owner = visitor()
    client = server.client
    client.submit(spec("fail", "1", max_restarts=1))
    client.wait("t1", {"finished"}, LIMIT_S)
    client.submit(spec("hold"))
    client.wait("t2", {"running"}, LIMIT_S)
    client.suspend("t2")
    client.wait("t2", {"suspended"}, LIMIT_S)
    client.submit(spec("hold", nodes=2))
    client.wait("t3", {"running"}, LIMIT_S)
    client.submit(spec("hold"))
    done = owner.get("/dashboard/tasks/t1")
    assert 'class="badge b-finished"' in done.text
    assert done.text.count('class="lane"') == 2
    assert "Attempt 2" in done.text
    assert 'class="mark m-fault"' in done.text
    assert 'id="stop"' not in done.text
    suspended = owner.get("/dashboard/tasks/t2").text
    assert 'id="resume"' in suspended
    assert 'id="suspend"' not in suspended
    assert 'class="mark m-suspend"' in suspended
    queued = Tags(owner.get("/dashboard/tasks/t4").text).text
    assert "Why the task waits" in queued
    assert "waits for 1 node; 0 free" in queued
    assert "The task has not started yet." in queued
    assert "waits for 1 node; 0 free" in Tags(owner.get("/dashboard/queue").text).text
    overview = Tags(owner.get("/dashboard").text).text
    assert "100 %occupied" in re.sub(r"\s+", " ", overview).replace("> <", "><").replace(
        "% o", "%o"
    )
    assert "rank 0: exit 1" in overview
    ledger = Tags(owner.get("/dashboard/ledger?window=1h").text).text
    assert "Cluster" in ledger
    by_user = ledger.partition("By user")[2]
    assert re.search(r"starting\s+[<\d]", by_user), "shares are told without colour"
    for state, tasks in (
        ("over", ["t1"]),
        ("suspended", ["t2"]),
        ("queued", ["t4"]),
        ("failed", []),
    ):
        listed = owner.get(f"/dashboard/tasks?state={state}").text
        assert re.findall(r'href="/dashboard/tasks/(t\d+)"', listed) == tasks


def test_tasks_that_share_a_node_are_told_apart(
    server: Server, visitor: MakeVisitor, spec: MakeSpec
) -> None:
    server.start(nodes=1, gpus="4:a100")
    owner = visitor()
    for gpus in (1, 2):
        server.client.wait(server.client.submit(spec("hold", gpus=gpus)).id, {"running"}, LIMIT_S)
    assert "t1 t2" in Tags(owner.get("/dashboard/nodes").text).text
    tasks = Tags(owner.get("/dashboard/tasks").text).text
    assert "1 × 1, 1 GPU each" in tasks
    assert "1 × 1, 2 GPUs each" in tasks


def test_the_history_is_told_in_words(server: Server, visitor: MakeVisitor, spec: MakeSpec) -> None:
    owner = visitor()
    server.client.submit(spec("hold"))
    log = Path(server.client.wait("t1", {"running"}, LIMIT_S).ranks[0].log)
    heartbeat.Writer(str(log.with_name("0.pulse"))).beat()
    server.client.suspend("t1")
    server.client.wait("t1", {"suspended"}, LIMIT_S)
    page = owner.get("/dashboard/tasks/t1").text
    history = Tags(page[page.index('id="history"') :]).text
    for line in (
        r"on n0\n", r"rank 0 on n0, pid 1000\n",
        r"rank 0 on n0: suspended\n", r"suspended: as asked for\n",
        r"first heartbeat (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC), last \1\n",
    ):  # fmt: skip
        assert re.search(line, history), line
    for raw in ("None", "False", "step", "saved", "['"):
        assert raw not in history


def test_forms_do_what_their_verbs_do(server: Server, visitor: MakeVisitor, spec: MakeSpec) -> None:
    ada, chief = visitor("ada"), visitor("eve", "operate")
    client = server.client
    assert ada.get("/dashboard").text.count('name="csrf"') == 1
    admin = Administration(client)
    (made,) = [token for token in admin.tokens() if token.user == "ada"]
    assert made.scope == "submit"
    client.submit(spec("hold"))
    client.wait("t1", {"running"}, LIMIT_S)
    steps: tuple[tuple[str, TaskState], ...] = (
        ("suspend", "suspended"), ("resume", "running"), ("stop", "stopped"),
    )  # fmt: skip
    for verb, state in steps:
        assert ada.post(f"/dashboard/tasks/t1/{verb}").status == 404  # it is the owner's
        answer = chief.post(f"/dashboard/tasks/t1/{verb}")
        assert (answer.status, answer.headers["Location"]) == (303, "/dashboard/tasks/t1")
        client.wait("t1", {state}, LIMIT_S)
    again = chief.post("/dashboard/tasks/t1/resume")
    assert again.status == 409
    assert 'role="alert"' in again.text
    assert chief.post("/dashboard/nodes/n1/drain", reason="  ").status == 400
    assert chief.post("/dashboard/nodes/n9/drain", reason="x").status == 404
    assert chief.post("/dashboard/nodes/n1/drain", reason="fan 2").status == 303
    assert [(node.state, node.reason) for node in client.nodes()] == [
        ("ready", ""), ("drained", "fan 2"),
    ]  # fmt: skip
    assert 'id="undrain"' in chief.get("/dashboard/nodes/n1").text
    assert 'id="undrain"' not in ada.get("/dashboard/nodes/n1").text
    assert chief.post("/dashboard/nodes/n1/undrain").status == 303
    assert {node.state for node in client.nodes()} == {"ready"}
    own = [
        (e.user, e.action, e.object, e.outcome) for e in admin.audit() if e.user in ("ada", "eve")
    ]
    assert ("ada", "stop", "t1", "NoSuchTask") in own
    assert ("eve", "stop", "t1", "ok") in own
    assert ("eve", "drain", "node n1", "ok") in own


def test_another_users_task_is_as_if_it_were_not_there(
    server: Server, visitor: MakeVisitor, spec: MakeSpec, tmp_path: Path
) -> None:
    ada, bob = visitor("ada"), visitor("bob")
    theirs = Somebody(server, tmp_path, "ada", "submit").client
    theirs.submit(spec("say", "my secret", name="secretproject", nodes=2))
    theirs.wait("t1", {"running"}, LIMIT_S)
    theirs.submit(spec("hold", name="secretproject"))
    own = Somebody(server, tmp_path, "bob", "submit").client
    own.submit(spec("hold", name="bobs"))
    assert "secretproject" in ada.get("/dashboard/tasks").text
    for path in (
        "/dashboard", "/dashboard/map", "/dashboard/queue", "/dashboard/tasks",
        "/dashboard/tasks?user=ada", "/dashboard/nodes", "/dashboard/nodes/n0", "/dashboard/ledger",
    ):  # fmt: skip
        answer = bob.get(path)
        assert answer.status == 200
        text = Tags(answer.text).text
        for word in ("secretproject", "my secret", "ada", "t1", "t2"):
            assert not re.search(rf"\b{word}\b", text), (path, word)
            assert f"/{word}" not in answer.text
    assert "t3" in bob.get("/dashboard/queue").text
    for path in ("", "/stop", "/log/0/text", "/log/0/stream"):
        missing = bob.get(f"/dashboard/tasks/t77{path}")
        found = bob.get(f"/dashboard/tasks/t1{path}")
        assert (found.status, missing.status) == (404, 404)
        assert lasting(found.text.replace("t1", "t77")) == lasting(missing.text)
    assert ada.get("/dashboard/tasks/t1/log/0/text").text == "my secret"


def test_lists_are_pages(server: Server, visitor: MakeVisitor, spec: MakeSpec) -> None:
    server.start(nodes=120)
    owner = visitor()
    server.client.submit(spec("hold", nodes=120))
    for _ in range(60):
        server.client.submit(spec("hold"))
    first = owner.get("/dashboard/tasks")
    names = re.findall(r'href="/dashboard/tasks/(t\d+)"', first.text)
    assert names == [f"t{number}" for number in range(61, 11, -1)]
    older = re.search(r'href="([^"]*before=12)"', first.text)
    assert older is not None
    second = owner.get(older[1].replace("&amp;", "&"))
    assert re.findall(r'href="/dashboard/tasks/(t\d+)"', second.text) == [
        f"t{number}" for number in range(11, 0, -1)
    ]
    places = []
    for page in range(3):
        text = owner.get(f"/dashboard/queue?page={page}").text
        places += [int(number) for number in re.findall(r'data-label="#">(\d+)<', text)]
    assert places == list(range(1, 61))
    assert owner.get("/dashboard/queue?page=7").status == 200
    listed = [
        owner.get(f"/dashboard/nodes?page={page}").text.count('<td data-label="Node"')
        for page in (0, 1)
    ]
    assert listed == [100, 20]
    drawing = owner.get("/dashboard/map").text
    assert drawing.count('<g class="n-full own">') == 121  # the legend has one
    assert drawing.count("<text") == 3


def test_quotas_and_users_are_shown_to_an_admin(server: Server, visitor: MakeVisitor) -> None:
    admin, ada = visitor("root", "admin"), visitor("ada")
    Administration(server.client).set_quota(Quota(user="ada", priority="high", gpus=8))
    text = Tags(admin.get("/dashboard/users").text).text
    for word in ("ada", "root", "enabled", "high", "no limit"):
        assert word in text
    assert ada.get("/dashboard/users").status == 403
    assert "/dashboard/users" not in ada.get("/dashboard").text


def test_tokens_in_use_are_those_that_are_taken(server: Server, visitor: MakeVisitor) -> None:
    owner = visitor()
    admin = Administration(server.client)
    admin.add_user("ada")
    for days in (None, 30.0, 1e-9):
        admin.create_token(TokenRequest(user="ada", days=days))
    admin.revoke_token(admin.create_token(TokenRequest(user="ada")).view.id)
    counted = r'data-label="Tokens in use">(\d+)<'
    assert re.findall(counted, owner.get("/dashboard/users").text) == ["2"]
    admin.disable_user("ada")
    assert re.findall(counted, owner.get("/dashboard/users").text) == ["0"]


def test_a_log_of_each_attempt(server: Server, visitor: MakeVisitor, spec: MakeSpec) -> None:
    owner = visitor()
    client = server.client
    client.submit(spec("say", "one ", ranks_per_node=2))
    view = client.wait("t1", {"running"}, LIMIT_S)
    client.suspend("t1")
    client.wait("t1", {"suspended"}, LIMIT_S)
    Path(view.ranks[1].log).write_text("first")
    client.resume("t1")
    client.wait("t1", {"running"}, LIMIT_S)
    for query, attempt, expected in (
        ("", 2, "one "),
        ("&attempt=1", 1, "first"),
        ("&attempt=2", 2, "one "),
    ):
        text = owner.get(f"/dashboard/tasks/t1?rank=1{query}").text
        place = f'data-attempt="{attempt}" data-offset="{len(expected)}">\n'
        assert f"{place}{expected}</pre>" in text, query
        assert ("data-pinned" in text) == bool(query)
    assert "The task has no such rank or attempt." in owner.get("/dashboard/tasks/t1?rank=2").text
    assert (
        "The task has no such rank or attempt." in owner.get("/dashboard/tasks/t1?attempt=9").text
    )


def test_a_profile_is_linked_and_its_report_runs_nothing(
    server: Server, visitor: MakeVisitor, spec: MakeSpec
) -> None:
    ada, bob = visitor("ada"), visitor("bob")
    server.client.submit(spec("hold"))
    view = server.client.wait("t1", {"running"}, LIMIT_S)
    owner = visitor()
    assert "/profile/" not in owner.get("/dashboard/tasks/t1").text
    folder = profile_folder(view.directory, 1)
    folder.mkdir(parents=True)
    report, trace = (
        f"/dashboard/tasks/t1/profile/1/{name}" for name in ("report.html", "trace.json")
    )
    (folder / "trace.json").symlink_to(server.client.home.token)
    (folder / "report.html").write_text(HOSTILE)
    page = owner.get("/dashboard/tasks/t1").text
    check_markup(page)
    assert f'href="{report}"' in page
    assert trace not in page
    answer = owner.get(report)
    assert (answer.status, answer.text) == (200, HOSTILE)
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("sandbox; default-src 'none';")
    assert "script" not in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert owner.get(trace).status == 409
    (folder / "trace.json").unlink()
    (folder / "trace.json").write_text("{}")
    assert trace in owner.get("/dashboard/tasks/t1").text
    answer = owner.get(trace)
    assert answer.headers["Content-Disposition"] == 'attachment; filename="t1-1-trace.json"'
    for path in (
        report.replace("1/report", "2/report"),
        report.replace("report.html", "rank0.jsonl"),
    ):
        assert owner.get(path).status in (400, 409), path
    for stranger in (ada, bob):
        assert stranger.get(report).status == 404

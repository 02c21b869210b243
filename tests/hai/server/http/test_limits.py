"""What users may use: quotas that hold, groups they are members of, workspaces of their own."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.hai.server.conftest import Server
from tests.hai.server.http.test_access import Somebody
from tests.waiting import LIMIT_S

from fireflyer.errors import ConfigError, PermissionDenied, TaskError, WorkspaceError
from fireflyer.hai.client.administration import Administration
from fireflyer.hai.controller.dispatch import Dispatch
from fireflyer.hai.database.connection import Database
from fireflyer.hai.database.node_marks import Marks
from fireflyer.hai.model import PRIORITIES, TaskSpec, WindowView
from fireflyer.hai.model.identity import Quota, Scope
from fireflyer.hai.model.observations import Validator
from fireflyer.hai.scheduling.cluster import ANY
from fireflyer.hai.scheduling.cluster import Quota as Held
from fireflyer.hai.workspaces import client as shipping

MakeSpec = Callable[..., TaskSpec]
Add = Callable[[str, Scope], Somebody]


@pytest.fixture
def add(server: Server, tmp_path: Path) -> Add:
    server.start(nodes=3)
    return lambda name, scope: Somebody(server, tmp_path, name, scope)


def test_a_quota_holds_until_it_is_raised_and_after_a_restart(
    server: Server, add: Add, spec: MakeSpec
) -> None:
    ada, bob = add("ada", "submit"), add("bob", "submit")
    admin = Administration(server.client)
    admin.set_quota(Quota(user="ada", priority="normal", nodes=1))
    for person in (ada, ada, bob):
        person.client.submit(spec("hold"))
    for task in ("t1", "t3"):
        server.client.wait(task, {"running"}, LIMIT_S)
    assert ada.client.task("t2").state == "queued"
    used_up = "the quota at this priority, 1 node, is used up: 1 node held"
    assert ada.client.why("t2").text == used_up
    admin.set_quota(Quota(user="ada", priority="normal", nodes=0))
    never = "the quota at this priority, 0 nodes, is too small for 1 node"
    assert ada.client.why("t2").text == never
    with pytest.raises(TaskError, match=f"^{never}; ask for less$"):
        ada.client.submit(spec("finish"))
    for priority in ("low", "auto"):
        ada.client.stop(ada.client.submit(spec("hold", priority=priority)).id)
    admin.set_quota(Quota(user="ada", priority="normal", nodes=1))
    port = server.client.server().port  # the one that the clients know
    server.kill()
    server.start(nodes=3, port=port)
    bob.client.submit(spec("finish"))
    bob.client.wait("t6", {"finished"}, LIMIT_S)
    assert ada.client.task("t2").state == "queued"
    admin.set_quota(Quota(user="ada", priority="normal", nodes=2))
    ada.client.wait("t2", {"running"}, LIMIT_S)
    admin.set_quota(Quota(user="ada", priority="normal"))
    assert admin.quotas() == []


def test_the_most_particular_row_counts(database: Database) -> None:
    dispatch = Dispatch("timeshare", Marks(database))
    dispatch.set_quotas(
        [Quota(user="ada", nodes=2), Quota(user="ada", priority="high", gpus=8), Quota(nodes=1)]
    )
    limit = dispatch.cluster.limit
    assert limit("ada", PRIORITIES["high"], "g") == Held(gpus=8)
    assert limit("ada", PRIORITIES["low"], "g") == Held(nodes=2)
    assert limit("bob", PRIORITIES["high"], "") == Held(nodes=1)
    assert len(dispatch.cluster.quotas) == 2 * len(PRIORITIES)
    dispatch.set_quotas([Quota(group="g", priority="normal", nodes=3)])
    assert dispatch.cluster.quotas == {(ANY, PRIORITIES["normal"], "g"): Held(nodes=3)}


def test_a_quota_is_for_a_priority_that_there_is(server: Server, add: Add) -> None:
    add("ada", "read")
    with pytest.raises(ConfigError, match="invalid priority urgent: expected one of low, normal"):
        Administration(server.client).set_quota(Quota(user="ada", priority="urgent", nodes=1))


def test_a_task_is_in_a_group_of_its_user(server: Server, add: Add, spec: MakeSpec) -> None:
    ada = add("ada", "submit")
    admin = Administration(server.client)
    admin.add_group("vision")
    with pytest.raises(PermissionDenied, match="ada is not a member of the group 'vision'"):
        ada.client.submit(spec("finish", group="vision"))
    admin.join("vision", "ada")
    assert ada.client.submit(spec("finish", group="vision")).spec.group == "vision"
    refused = [entry for entry in admin.audit() if entry.outcome == "PermissionDenied"]
    assert [(entry.user, entry.action) for entry in refused] == [("ada", "submit")]


def test_the_home_s_own_user_names_any_group_that_there_is(server: Server, spec: MakeSpec) -> None:
    server.start()
    admin = Administration(server.client)
    admin.add_group("vision")
    assert server.client.submit(spec("finish", group="vision")).spec.group == "vision"
    for typo in ("visoin", "vision" * 100):
        with pytest.raises(
            ConfigError, match=r"group 'vis.* does not exist; create it with `fireflyer group add`"
        ):
            server.client.submit(spec("finish", group=typo))
    assert [view.id for view in server.client.tasks()] == ["t1"]
    refused = [entry.action for entry in admin.audit() if entry.outcome == "ConfigError"]
    assert refused == ["submit", "submit"]


def test_a_workspace_is_its_users_own(
    server: Server, add: Add, spec: MakeSpec, tmp_path: Path
) -> None:
    ada, bob, eve = add("ada", "submit"), add("bob", "submit"), add("eve", "operate")
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text("print(1)")
    shipped = shipping.ship(ada.client, source).id
    task = spec("finish", script="train.py", cwd=".", workspace=shipped)
    with pytest.raises(WorkspaceError, match="no workspace"):
        bob.client.submit(task)
    for path in (f"/workspaces/{shipped}", f"/workspaces/{shipped}/blobs/{'0' * 64}"):
        assert bob.ask("GET", path)[0] == 400
    assert ada.ask("GET", f"/workspaces/{shipped}")[0] == 200
    assert [view.user for view in shipping.views(bob.client)] == []
    assert [view.user for view in shipping.views(eve.client)] == ["ada"]
    assert shipping.ship(bob.client, source).sent_files == 1
    bob.client.submit(task)
    view = ada.client.submit(task)
    ada.client.wait(view.id, {"finished"}, LIMIT_S)
    assert (Path(view.directory) / "workspace" / "train.py").read_text() == "print(1)"


def test_times_that_no_calendar_has_are_refused(server: Server, add: Add) -> None:
    eve = add("eve", "operate")
    for when in (1e308, -1.0):
        with pytest.raises(ConfigError, match="Expected `float`"):
            eve.client.add_window(WindowView(nodes=("n1",), begin=0.0, end=when))
        with pytest.raises(ConfigError, match="Expected `float`"):
            eve.client.drain("n1", "fan", until=when)
    with pytest.raises(ConfigError, match="the reason has control characters"):
        eve.client.drain("n1", "a\nb")
    with pytest.raises(ConfigError, match="the reason has 501 characters"):
        eve.client.add_window(WindowView(nodes=("n1",), begin=0.0, end=1.0, reason="x" * 501))


def test_windows_are_lines_of_the_audit_log(server: Server, add: Add) -> None:
    eve = add("eve", "operate")
    window = eve.client.add_window(WindowView(nodes=("n1",), begin=0.0, end=time.time() + 3600))
    eve.client.undrain("n1")
    eve.client.remove_window(window.id)
    with pytest.raises(TaskError, match="no window"):
        eve.client.remove_window("w9")
    audit = Administration(server.client).audit()
    found = [(entry.action, entry.object, entry.outcome) for entry in audit if entry.user == "eve"]
    assert found == [
        ("window.add", "window w1", "ok"),
        ("undrain", "node n1", "ok"),
        ("window.remove", "window w1", "ok"),
        ("window.remove", "window w9", "TaskError"),
    ]


def test_what_an_operator_says_has_reasons_times_and_names_that_there_are(
    server: Server, add: Add
) -> None:
    client = add("ada", "operate").client
    with pytest.raises(ConfigError, match="a drain needs a reason"):
        client.drain("n0", "  ")
    with pytest.raises(ConfigError, match="control characters"):
        client.drain("n0", "fan\0")
    with pytest.raises(ConfigError, match="must be in the future"):
        client.drain("n0", "fan", 5.0)
    assert client.nodes()[0].state == "ready"
    window = WindowView(nodes=("n0",), begin=0.0, end=time.time() + 3600)
    for user, group in (("nobody", ""), ("", "none"), ("ada\0", "")):
        with pytest.raises(ConfigError, match=r"(user|group) .* does not exist"):
            client.add_window(msgspec.structs.replace(window, user=user, group=group))
    assert client.windows() == []
    assert client.add_window(msgspec.structs.replace(window, user="ada")).user == "ada"
    with pytest.raises(ConfigError, match="control characters"):
        client.observed(Validator(node="n0", check="gemm\0", passed=False))

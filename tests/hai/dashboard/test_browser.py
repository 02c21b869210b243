"""A person at a browser: signs in, follows a log, suspends, on a phone and at a desk."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.hai.dashboard.browser import DESKTOP, PHONE, Browser, missing
from tests.hai.dashboard.test_pages import HOSTILE, RIGHT_TO_LEFT
from tests.hai.dashboard.test_use import record
from tests.hai.dashboard.test_validation_pages import seed
from tests.hai.server.conftest import Server
from tests.hai.server.http.test_access import Somebody
from tests.waiting import LIMIT_S

from fireflyer.hai.client.administration import Administration
from fireflyer.hai.model import TaskSpec
from fireflyer.hai.sampling.series import point

pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(missing()), reason=missing())]

MakeSpec = Callable[..., TaskSpec]

PAGES = (
    "", "/map", "/queue", "/tasks", "/tasks?state=running", "/tasks/t1", "/tasks/t2/stop", "/tasks/t2",
    "/tasks/t3", "/tasks/t99", "/nodes", "/nodes/n0", "/nodes/n1", "/ledger", "/users", "/use",
)  # fmt: skip


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    """Signed in nowhere."""
    chromium.open("about:blank")
    chromium.driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
    chromium.look(DESKTOP)
    chromium.complaints()
    return chromium


@pytest.fixture
def root(server: Server) -> str:
    """Where the pages are."""
    server.start()
    return f"http://127.0.0.1:{server.client.server().port}/dashboard"


def enter(browser: Browser, server: Server) -> None:
    """By a link, as the home's own user."""
    browser.open(server.client.dashboard_link())
    browser.until_text("h1", "Overview")


def grow(path: str, text: str) -> None:
    with Path(path).open("ab", buffering=0) as file:
        file.write(text.encode())


def test_a_link_signs_in_and_is_gone(browser: Browser, server: Server, root: str) -> None:
    link = server.client.dashboard_link()
    browser.open(link)
    browser.until_text("h1", "Overview")
    assert browser.driver.current_url == root
    assert browser.run("return document.cookie") == ""
    assert browser.complaints() == []
    browser.find(".out button").click()
    browser.until_text("label", "Token")
    browser.open(f"{root}/map")
    browser.until_text("label", "Token")
    assert browser.driver.current_url == f"{root}/sign-in?next=/dashboard/map"
    browser.open(link)
    browser.until_text("[role=alert]", "a code works once")


def test_a_link_signs_in_where_the_page_is_open_already(
    browser: Browser, server: Server, root: str
) -> None:
    first, second = (server.client.dashboard_link() for _ in range(2))
    browser.open(f"{root}/sign-in")
    browser.open(first)
    browser.until_text("h1", "Overview")
    assert browser.driver.current_url == root
    browser.find(".out button").click()
    browser.until_text("label", "Token")
    browser.open(first)
    browser.until_text("[role=alert]", "a code works once")
    assert "code=" not in browser.driver.current_url
    browser.complaints()  # of the 401
    browser.open(second)
    browser.until_text("h1", "Overview")
    assert browser.driver.current_url == root
    assert browser.complaints() == []


def test_a_token_signs_in_and_leads_on(
    browser: Browser, server: Server, root: str, tmp_path: Path
) -> None:
    token = Somebody(server, tmp_path, "ada", "submit").made.token
    browser.open(f"{root}/tasks?state=over")
    browser.find("#token").send_keys(token)
    browser.find("[data-sign-in] button").click()
    browser.until_text("h1", "Tasks")
    assert browser.driver.current_url == f"{root}/tasks?state=over"
    assert browser.complaints() == []


def test_a_log_grows_pauses_and_goes_on_with_the_next_attempt(
    browser: Browser, server: Server, root: str, spec: MakeSpec
) -> None:
    client = server.client
    log = watched(browser, server, root, spec("say", "first line\n"))
    assert browser.text("#log") == "first line\n"
    grow(log, f"{HOSTILE}\x1b[31mred\x1b[0m\n")
    browser.until_text("#log", f"first line\n{HOSTILE}red\n")
    grow(log, "10%\r")
    browser.until_text("#log", "red\n10%")
    grow(log, "20%\rdone\n\x1b[3")
    browser.until_text("#log", "red\ndone\n")
    grow(log, "1mblue")
    browser.until_text("#log", "done\nblue")
    browser.find("#pause").click()
    browser.until_text("#log-note", "Paused.")
    grow(log, " and more")
    client.drain("n1", "so that the page looks again", None)
    assert "and more" not in browser.text("#log")
    browser.find("#pause").click()
    browser.until_text("#log", "done\nblue and more")
    assert browser.run("return document.querySelector('#log').children.length") == 0
    client.suspend("t1")
    browser.until_text("#log-note", "The attempt is over.")
    client.resume("t1")
    browser.until_text("#log-section .note", "attempt 2")
    browser.until_text("#log-note", "Live.")
    assert browser.text("#log") == "first line\n"
    assert browser.complaints() == []


def watched(browser: Browser, server: Server, root: str, says: TaskSpec) -> str:
    """The file of the log of a first task whose page is open and follows it."""
    server.client.submit(says)
    view = server.client.wait("t1", {"running"}, LIMIT_S)
    enter(browser, server)
    browser.open(f"{root}/tasks/t1")
    browser.until_text("#log-note", "Live.")
    return view.ranks[0].log


def test_a_sequence_without_an_end_hides_no_line(
    browser: Browser, server: Server, root: str, spec: MakeSpec
) -> None:
    log = watched(browser, server, root, spec("say", "\x1b]0;epoch 1\nbegin\n"))
    shown = "\nbegin\n"
    assert browser.text("#log") == shown
    for begin in ("]0;", "P", "X", "_", "^", "[3"):
        grow(log, f"{begin}\x1b{begin}1")
        shown += begin
        browser.until(lambda: browser.text("#log") == shown, f"what stands before {begin}")  # noqa: B023
        grow(log, "2\nnext\x1b")
        shown += "\nnext"
        browser.until(lambda: browser.text("#log") == shown, f"a line after {begin}")  # noqa: B023
        grow(log, "[m\n")
        shown += "\n"
    grow(
        log,
        "\x1b]0;title\x1b[31mred\x1b[0m \x1b]8;;http://e\x1b\\link\x1b]8;;\x07.\n",
    )
    browser.until(lambda: browser.text("#log") == f"{shown}red link.\n", "sequences that end")
    assert browser.complaints() == []


def test_a_page_keeps_only_the_end_of_a_long_log(
    browser: Browser, server: Server, root: str, spec: MakeSpec
) -> None:
    log = watched(browser, server, root, spec("say", "begin\n"))
    grow(log, "".join(f"{HOSTILE} line {number}\n" for number in range(20_000)))
    browser.until_text("#log", "line 19999\n")
    text = browser.text("#log")
    assert 4000 <= text.count("\n") <= 5000
    assert "begin" not in text
    nodes = "return document.querySelector('#log').childNodes.length"
    assert browser.run(nodes) < 100
    rest = "const e = document.querySelector('#log'); return e.scrollHeight - e.scrollTop - e.clientHeight"
    assert browser.run(rest) < 40  # it follows
    assert browser.complaints() == []


def test_suspend_and_stop_by_buttons(
    browser: Browser, server: Server, root: str, spec: MakeSpec
) -> None:
    server.client.submit(spec("hold"))
    server.client.wait("t1", {"running"}, LIMIT_S)
    enter(browser, server)
    browser.open(f"{root}/tasks/t1")
    browser.find("#suspend").click()
    browser.until_text("#state .badge", "suspended")
    browser.until(lambda: browser.run("return !!document.querySelector('.m-suspend')"), "a mark")
    assert browser.run("return document.querySelectorAll('#timeline .lane.main rect').length") >= 2
    browser.find("#resume").click()
    browser.until_text("#state .badge", "running")
    browser.find("#stop").click()
    browser.until_text("h1", "Stop t1?")
    browser.find(".danger").click()
    browser.until_text("#state .badge", "stopped")
    assert server.client.task("t1").state == "stopped"
    assert browser.complaints() == []


def test_a_page_follows_what_others_do(
    browser: Browser, server: Server, root: str, spec: MakeSpec
) -> None:
    enter(browser, server)
    browser.open(f"{root}/tasks")
    browser.run("document.querySelector('.tabs a').focus(); window.same = true")
    server.client.submit(spec("hold", name="somebody elses"))
    browser.until_text("#tasks", "somebody elses")
    assert browser.run("return window.same && document.activeElement.textContent") == "all"
    browser.open(f"{root}/nodes/n0")
    server.client.drain("n0", "fan 2", None)
    browser.until_text("#node", "fan 2")
    assert browser.complaints() == []


BY_HAND = """
window.setInterval = () => 0;
window.EventSource = class {
  constructor() { window.changes = this; }
  addEventListener(_, call) { this.tell = call; }
  close() {}
};
const real = window.fetch;
window.fetch = (...asked) => real(...asked).then((answer) => new Promise((give) => {
  window.give = () => give(answer);
}));
"""
"""A page hears that something has changed, and gets its answers, when a test says so."""


def test_no_change_is_missed_while_a_page_opens_or_looks(
    browser: Browser, server: Server, root: str
) -> None:
    enter(browser, server)
    added = browser.driver.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument", {"source": BY_HAND}
    )
    try:
        browser.open(f"{root}/nodes/n0")
        server.client.drain("n0", "between page and stream", None)
        browser.run("changes.onopen()")
        browser.until(lambda: browser.run("return !!window.give"), "an answer under way")
        server.client.drain("n0", "behind the answer", None)
        browser.run("look()")  # as a timer would: the answer takes longer than the pause
        browser.run("give(); window.give = null")
        browser.until_text("#node", "between page and stream")
        browser.until(lambda: browser.run("return !!window.give"), "a second answer")
        browser.run("give()")
        browser.until_text("#node", "behind the answer")
    finally:
        browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    assert browser.complaints() == []


@pytest.mark.parametrize("page", ["", "/tasks/t1"])
def test_a_page_says_that_the_server_is_gone(
    browser: Browser, server: Server, root: str, spec: MakeSpec, page: str
) -> None:
    server.client.submit(spec("hold"))
    server.client.wait("t1", {"running"}, LIMIT_S)
    port = server.client.server().port
    enter(browser, server)
    browser.open(root + page)
    assert browser.find("#away").get_attribute("role") == "status"
    assert browser.text("#away") == ""
    assert browser.complaints() == []
    server.kill()
    browser.until_text("#away", "No answer from the server since ")
    assert re.fullmatch(r".* since \d\d:\d\d:\d\d; trying again\.", browser.text("#away"))
    for size in (PHONE, DESKTOP):
        browser.look(size)
        assert (browser.overhang(), browser.wide()) == (0, [])
        browser.run("scrollTo(0, document.body.scrollHeight)")
        box = "const box = document.querySelector('#away').getBoundingClientRect(); "
        assert browser.run(box + "return box.top >= 0 && box.bottom <= innerHeight")
    server.start(port=port)
    browser.until_text("label", "Token")  # which asks everybody to sign in again


def test_what_says_that_the_server_is_gone_goes_when_it_answers(
    browser: Browser, server: Server, root: str
) -> None:
    enter(browser, server)
    browser.run("window.same = true")
    browser.driver.execute_cdp_cmd("Network.enable", {})
    calm = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    for gone in (True, False, True, False):
        said = {"offline": gone, **calm}
        browser.driver.execute_cdp_cmd("Network.emulateNetworkConditions", said)
        browser.run("document.dispatchEvent(new Event('visibilitychange'))")  # so that it looks
        browser.until(lambda: bool(browser.text("#away")) == gone, f"{gone}")  # noqa: B023
    assert browser.run("return window.same && document.querySelector('#away').offsetHeight") == 0
    server.client.drain("n0", "fan 2", None)
    browser.until_text("#tiles", "1 drained")


def test_a_task_that_starts_gets_its_log_and_its_ranks(
    browser: Browser, server: Server, root: str, spec: MakeSpec
) -> None:
    server.client.submit(spec("hold", nodes=2))
    server.client.wait("t1", {"running"}, LIMIT_S)
    server.client.submit(spec("say", "at last"))
    enter(browser, server)
    browser.open(f"{root}/tasks/t2")
    browser.until_text("#why", "waits for 1 node; 0 free")
    assert "It has not started yet." in browser.text("#log-section")
    server.client.stop("t1")
    browser.until_text("#state .badge", "running")
    browser.until_text("#log", "at last")
    browser.until_text("#log-note", "Live.")
    browser.until_text("#ranks", "runs")
    assert browser.run("return document.querySelector('#why').hidden")
    assert browser.complaints() == []


@pytest.mark.parametrize(("size", "dark"), [(PHONE, True), (DESKTOP, False)])
def test_nothing_is_wider_than_the_window(
    browser: Browser, server: Server, root: str, spec: MakeSpec, size: tuple[int, int], dark: bool
) -> None:
    client = server.client
    long = (HOSTILE + RIGHT_TO_LEFT + "x" * 200)[:200]
    client.submit(spec("fail", "9", max_restarts=2))
    client.wait("t1", {"failed"}, LIMIT_S)
    client.submit(spec("say", "w" * 3000 + "\n", name=long, nodes=2, labels={"l" * 60: "v" * 200}))
    client.wait("t2", {"running"}, LIMIT_S)
    client.submit(spec("hold", "a" * 500, name="y" * 200))
    client.drain("n1", "z" * 190, None)
    enter(browser, server)
    browser.look(size, dark=dark)
    for page in PAGES:
        browser.open(root + page)
        assert (browser.overhang(), browser.wide()) == (0, []), page
        missing = [text for text in browser.complaints() if "404" not in text]
        assert missing == [], page


@pytest.mark.parametrize(("size", "dark"), [(PHONE, True), (DESKTOP, False)])
def test_charts_fit_their_columns(
    browser: Browser, server: Server, root: str, size: tuple[int, int], dark: bool
) -> None:
    enter(browser, server)
    used = [point(held=1.0 + at, capacity=96.0, cpu=0.5) for at in range(60)]
    record(server.home, {"cluster": used, "node:n0": used})
    browser.look(size, dark=dark)
    for page in ("", "/use", "/use?scope=node:n0", "/nodes/n0"):
        browser.open(root + page)
        assert browser.run("return document.querySelectorAll('.charts svg').length"), page
        assert (browser.overhang(), browser.wide()) == (0, []), page


@pytest.mark.parametrize(("size", "dark"), [(PHONE, True), (DESKTOP, False)])
def test_maps_of_checks_fit_the_window(
    browser: Browser, server: Server, size: tuple[int, int], dark: bool
) -> None:
    seed(server)
    server.start()
    enter(browser, server)
    root = browser.driver.current_url
    browser.look(size, dark=dark)
    for page in ("/validations", "/validations/n0", "/validations/n1"):
        browser.open(root + page)
        assert (browser.overhang(), browser.wide()) == (0, []), page
        assert browser.complaints() == [], page
    browser.open(f"{root}/validations")
    browser.find("#worst td a").click()
    browser.until_text("h1", "Checks of n0")


def test_two_users_see_their_own(
    browser: Browser, server: Server, root: str, spec: MakeSpec, tmp_path: Path
) -> None:
    ada, bob = (Somebody(server, tmp_path, name, "submit") for name in ("ada", "bob"))
    ada.client.submit(spec("say", "secret", name="adas work", nodes=2))
    ada.client.wait("t1", {"running"}, LIMIT_S)
    bob.client.submit(spec("hold", name="bobs work"))
    for person, own, other in ((ada, "adas work", "bobs work"), (bob, "bobs work", "adas work")):
        browser.open(f"{root}/sign-in")
        browser.find("#token").send_keys(person.made.token)
        browser.find("[data-sign-in] button").click()
        browser.until_text("h1", "Overview")
        for page in ("", "/tasks", "/queue", "/map", "/nodes", "/nodes/n0"):
            browser.open(root + page)
            assert other not in browser.run("return document.documentElement.outerHTML")
        browser.open(f"{root}/tasks")
        assert own in browser.text("#tasks")
    browser.open(f"{root}/tasks/t1")
    browser.until_text("h1", "Not found")
    Administration(server.client).disable_user("bob")
    browser.open(f"{root}/tasks")
    browser.until_text("label", "Token")


def test_pages_work_without_scripts(
    server: Server, root: str, spec: MakeSpec, tmp_path: Path
) -> None:
    browser = Browser(tmp_path, scripts=False)
    try:
        server.client.submit(spec("say", "what it says"))
        server.client.wait("t1", {"running"}, LIMIT_S)
        browser.open(root)
        browser.find("#token").send_keys(server.client.dashboard_link().partition("#code=")[2])
        browser.find("[data-sign-in] button").click()
        assert "Overview" in browser.find("h1").text
        for target in ("/dashboard/map", "/dashboard/nodes/n0", "/dashboard/tasks/t1"):
            browser.find(f"a[href='{target}']").click()
            assert browser.driver.current_url.endswith(target)
        assert browser.find("#log").text == "what it says"
        browser.find("#suspend").click()
        server.client.wait("t1", {"suspended"}, LIMIT_S)
        browser.find("footer a").click()
        assert browser.find("#state .badge").text == "suspended"
    finally:
        browser.close()

"""Formats events of the histories of tasks and nodes as text for users. Pure."""

from typing import Any

from fireflyer.hai.model import Event
from fireflyer.hai.model.validations import Ended, Entry, Returned, Started, Suspected


def event_pieces(event: Event) -> list[str | float]:
    """Returns the pieces of one line, in order: text, and moments (wall clock), which a page
    converts to its reader's time zone. Empty if the event's kind needs no further text."""
    detail = event.detail
    match event.kind:
        case "progress":
            return _progress(detail)
        case "starting":
            return ["on " + ", ".join(map(str, detail["nodes"]))]
        case "rank_started":
            return [f"{_rank(detail)}, pid {detail['pid']}"]
        case "rank_joined":
            return [_rank(detail)]
        case "rank_exited":
            return [f"{_rank(detail)}: {_end(detail)}"]
        case "leased":
            return [f"generation {detail['generation']}: {', '.join(map(str, detail['members']))}"]
        case "gang_ended":
            return _line(detail["outcome"], detail.get("reason"))
        case "restarting":
            by_nodes = detail.get("node_faults")
            count = f"{detail['restarts']} of {detail['max_restarts']}"
            more = f", {by_nodes} by nodes" if by_nodes else ""
            return _line(count + more + _avoids(detail), detail.get("reason"))
        case "observed":
            return _line(detail.get("node"), detail["text"])
        case "acted":
            rule = f" (rule {detail['rule']})" if detail["rule"] else ""
            return _line(detail.get("node"), detail["action"] + rule + _avoids(detail))
    return _line("", detail.get("reason"))


def entry_text(entry: Entry) -> str:
    """Returns one line about an entry of the journal of validations."""
    match entry:
        case Suspected():
            what = "drained" if entry.drained else "suspected"
            return f"{what}: {entry.kind} {entry.check}".rstrip()
        case Started():
            return f"validation started ({entry.trigger})"
        case Returned():
            return "passed, and returned to service"
        case Ended():
            if entry.failed:
                told = "; ".join(f"{found.name}: {found.reason}" for found in entry.failed)
                return f"validation failed: {told}"
            passed = sum(found.status == "passed" for found in entry.findings)
            rest = f"{passed} passed, {len(entry.findings) - passed} not run"
            return f"validation ended: {entry.error or rest}"


def _progress(detail: dict[str, Any]) -> list[str | float]:
    """Formats progress. A step of -1 means no step; a save time of 0 means no save."""
    step, saved_step = detail.get("step", -1), detail.get("saved_step", -1)
    found: list[str | float] = [
        "first heartbeat ", float(detail["first"]), ", last ", float(detail.get("last", 0.0)),
    ]  # fmt: skip
    if step >= 0:
        found.append(f", step {step}")
    if detail.get("saved"):
        found += [", saved ", float(detail["saved"])]
        if saved_step >= 0:
            found.append(f" at step {saved_step}")
    return found


def _rank(detail: dict[str, Any]) -> str:
    newcomer = f" (newcomer {detail['incarnation']})" if detail.get("incarnation") else ""
    return f"rank {detail['rank']} on {detail['node']}{newcomer}"


def _end(detail: dict[str, Any]) -> str:
    if detail.get("suspended"):
        how = "suspended"
    elif detail["signal"] is not None:
        how = f"signal {detail['signal']}"
    else:
        how = "lost with its node" if detail["code"] is None else f"exit {detail['code']}"
    return f"{how}; the other ranks continue" if detail.get("lost") else how


def _avoids(detail: dict[str, Any]) -> str:
    return f", avoids {', '.join(detail['avoid'])}" if detail.get("avoid") else ""


def _line(what: str | None, text: str | None) -> list[str | float]:
    """Returns "what: text" without missing parts."""
    line = ": ".join(part for part in (what, text) if part)
    return [line] if line else []

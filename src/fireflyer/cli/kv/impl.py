"""Implementation of `fireflyer kv`."""

import base64
import sys
from pathlib import Path
from typing import Any

from fireflyer import kv, units
from fireflyer.cli.printing import as_json, show_result, table
from fireflyer.errors import ConfigError
from fireflyer.kv import inspection
from fireflyer.kv.core.reader import no_store
from fireflyer.kv.opening import is_missing
from fireflyer.kv.pages import inspection as pages
from fireflyer.program import plain, report
from fireflyer.storage import Storage, open_storage

_SHOWN = 60


def _key(text: str, hexadecimal: bool) -> bytes:
    if not hexadecimal:
        return text.encode("utf-8", "surrogateescape")
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ConfigError(f"invalid key {text!r}: expected hexadecimal digits") from None


def get(url: str, key: str, *, hexadecimal: bool, snapshot: str | None) -> int:
    """Writes the value of a key to stdout; returns 1 if the key does not exist."""
    wanted = _key(key, hexadecimal)
    if snapshot is not None:
        with kv.open(url, snapshot=snapshot) as pinned:
            found = pinned.get(wanted)
    else:
        with kv.open(url, poll=0) as store:
            found = store.get(wanted)
    if found is None:
        return report(f"no value for key {key!r} in {url}")
    sys.stdout.flush()
    sys.stdout.buffer.write(found)
    return 0


def put(
    url: str, key: str, value: str | None, file: Path | None, ttl: str, *, hexadecimal: bool
) -> None:
    """Sets a value."""
    if value is not None and file is not None:
        raise ConfigError("kv put takes VALUE or --file FILE, not both")
    if file is not None:
        data = file.read_bytes()
    else:
        data = sys.stdin.buffer.read() if value is None else _key(value, False)
    seconds = units.parse_seconds(ttl, "--ttl") if ttl else None
    with kv.open(url, write=True) as store:
        store.put(_key(key, hexadecimal), data, ttl=seconds)


def delete(url: str, key: str, *, hexadecimal: bool) -> None:
    """Deletes a key."""
    with kv.open(url, write=True) as store:
        store.delete(_key(key, hexadecimal))


def scan(
    url: str, prefix: str, start: str, end: str, limit: int, *, hexadecimal: bool, keys_only: bool,
    json: bool,
) -> None:  # fmt: skip
    """Prints keys and values."""
    first, last = _key(start, hexadecimal), _key(end, hexadecimal) if end else None
    rows: list[tuple[str, ...]] = []
    with kv.open(url, poll=0) as store:
        for key, value in store.scan(first, last, prefix=_key(prefix, hexadecimal), limit=limit):
            if json:
                as_json({**_named("key", key), **({} if keys_only else _named("value", value))})
                continue
            shown = key.hex() if hexadecimal else plain(key.decode("utf-8", "backslashreplace"))
            rows.append((shown,) if keys_only else (shown, str(len(value)), _short(value)))
    if not json:
        table(("KEY",) if keys_only else ("KEY", "BYTES", "VALUE"), rows)


def _named(name: str, data: bytes) -> dict[str, str]:
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}64": base64.b64encode(data).decode()}


def _short(value: bytes) -> str:
    text = plain(value[: 4 * _SHOWN].decode("utf-8", "backslashreplace"))
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _storage(url: str) -> Storage:
    if is_missing(url):
        raise no_store(url)
    return open_storage(url)


def stat(url: str, *, json: bool) -> None:
    """Prints figures of a store."""
    _show(inspection.stat(_storage(url)), json=json)


def check(url: str, *, json: bool) -> int:
    """Checks a store and prints its damaged objects; returns 1 if there are any."""
    return _report_damage(inspection.check(_storage(url)), json=json)


def cache_stat(url: str, *, json: bool) -> None:
    """Prints figures of a page cache."""
    found = pages.stat(_storage(url))
    usage = found["usage"]

    def show_text() -> None:
        _show({name: value for name, value in found.items() if name != "usage"}, json=False)
        if usage:
            rows = [(salt or "(none)", str(size)) for salt, size in usage.items()]
            table(("SALT", "BYTES"), rows)

    show_result(found, show_text, json=json)


def cache_check(url: str, *, json: bool) -> int:
    """Checks a page cache and prints its damaged segments; returns 1 if there are any."""
    return _report_damage(pages.check(_storage(url)), json=json)


def _report_damage(found: dict[str, Any], *, json: bool) -> int:
    damaged = [(row["object"], row["reason"]) for row in found["damaged"]]

    def show_text() -> None:
        if damaged:
            table(("DAMAGED", "REASON"), damaged)
        else:
            _show({name: value for name, value in found.items() if name != "damaged"}, json=False)

    show_result(found, show_text, json=json)
    return 1 if damaged else 0


def compact(url: str, *, json: bool) -> None:
    """Merges all tables and deletes unused objects."""
    inspection.require_store(_storage(url))
    with kv.open(url, write=True) as store:
        store.flush()
        store.compact(everything=True)
        done = store.collect()
    _show({"tables_deleted": done.tables, "log_objects_deleted": done.log}, json=json)


def gc(url: str, *, json: bool) -> None:
    """Deletes unused objects."""
    inspection.require_store(_storage(url))
    with kv.open(url, write=True) as store:
        done = store.collect()
    _show({"tables_deleted": done.tables, "log_objects_deleted": done.log}, json=json)


def _show(found: dict[str, Any], *, json: bool) -> None:
    rows = [(name.replace("_", " "), str(value)) for name, value in found.items()]
    show_result(found, lambda: table(("WHAT", "VALUE"), rows), json=json)

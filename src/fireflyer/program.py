"""Shared entry point of the command lines: an error becomes one line on stderr and an exit code.

A program may start with standard descriptors closed (cron, systemd, `>&-`), with a pipe whose reader
is gone, or in a locale whose encoding lacks most characters. None of these causes a traceback.
"""

import contextlib
import io
import itertools
import os
import pwd
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fireflyer.errors import ConfigError, FireflyerError

if TYPE_CHECKING:
    import typer


_DELETED = "the current directory was deleted: change to one that exists"
INTERRUPTED = 130
"""Exit code after Ctrl-C, as in a shell: 128 plus the number of SIGINT."""
_json_mode = False
"""True if the command line that runs has `--json`: an error is then also an object on stdout."""
_json_written = False
"""True once the command line that runs has written a result: no error object follows it."""


def json_option() -> Any:
    """Returns the option `--json` that every verb with a result has.

    A verb with this option writes its result to stdout as one JSON document. A stream is written as
    one document a line. An error is written as `{"error": {"type": ..., "message": ...}}`.
    """
    import typer

    def remember(value: bool) -> bool:
        global _json_mode
        _json_mode = value
        return value

    return typer.Option(  # eager: parsed before an option that may be invalid
        "--json", callback=remember, is_eager=True, help="Print JSON alone on stdout."
    )


def current_json_form(arguments: Sequence[str]) -> list[str]:
    """Turns the old `--json FILE` into `--output FILE`, and `--json -` into `--json`.

    `sim` and `bench` once had only the old form.
    """
    words: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        value = None
        if word == "--json" and rest and (rest[0] == "-" or not rest[0].startswith("-")):
            value = rest.pop(0)
        elif word.startswith("--json="):
            value = word.partition("=")[2]
        else:
            words.append(word)
            continue
        words += ["--json"] if value == "-" else ["--output", value]
    return words


def run_app(app: "typer.Typer", name: str, arguments: list[str]) -> int:
    """Runs a Typer program under its public name and returns its exit code; an interrupt is 130."""
    from typer.main import get_command

    def act() -> int:
        command = get_command(app)
        keep_context(command)
        code = command.main(args=arguments, prog_name=name, standalone_mode=False)
        return code if isinstance(code, int) else 0

    return in_one_line(act, arguments)


def in_one_line(act: Callable[[], int], arguments: Sequence[str] = ()) -> int:
    """Runs `act` and returns its exit code.

    Every error is one line on stderr and exit code 1; a wrong command line is 2, Ctrl-C 130. With
    `--json` an error is also an object on stdout.

    Args:
        act: parses and runs a command line.
        arguments: the command line. If it cannot be parsed, `--json` is looked for in it.
    """
    global _json_mode, _json_written
    from typer.exceptions import Abort, TyperException

    open_standard_streams()
    _json_mode = _json_written = False
    try:
        code = act()
        sys.stdout.flush()
        return code
    except TyperException as error:
        _json_mode = _json_mode or _has_json(error, arguments)
        return fail("UsageError", error.format_message(), error.exit_code)
    except (KeyboardInterrupt, Abort):
        return report("interrupted", INTERRUPTED)
    except BrokenPipeError:
        return 1
    except (OSError, FireflyerError) as error:
        return fail(type(error).__name__, described(error), 1)
    finally:
        for stream in (sys.stdout, sys.stderr):
            _flush_or_discard(stream)


def keep_context(command: Any) -> None:
    """Makes errors of parsing name the verb, also a missing value of an option, for `--json`."""
    from typer.exceptions import TyperException

    parse = command.parse_args

    def parse_args(context: Any, arguments: list[str]) -> Any:
        try:
            return parse(context, arguments)
        except TyperException as error:
            if getattr(error, "ctx", context) is None:
                error.ctx = context  # type: ignore[attr-defined]
            raise

    command.parse_args = parse_args
    for inner in getattr(command, "commands", {}).values():
        keep_context(inner)


def _has_json(error: Any, arguments: Sequence[str]) -> bool:
    """Returns whether a command line that could not be parsed asks for JSON.

    Some words do not count, because they may belong to another program: those after `--`, and those
    after the first argument of a verb whose options end there. A group needs no `--json` of its own,
    because its verbs may have it.
    """
    context = getattr(error, "ctx", None)
    if context is None:
        return False
    words = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    command = context.command
    verbs = getattr(command, "commands", None)
    if verbs is not None:
        ends = {name for name, verb in verbs.items() if _ends_at_argument(verb)}
        return "--json" in itertools.takewhile(lambda word: word not in ends, words)
    if not any("--json" in its.opts for its in command.params):
        return False
    if _ends_at_argument(command):
        after = words.index(context.info_name) + 1 if context.info_name in words else 0
        words = list(_leading_options(command, words[after:]))
    return "--json" in words


def _ends_at_argument(command: Any) -> bool:
    """Returns whether the options of a verb end at its first argument; False for a group."""
    return not command.context_settings.get("allow_interspersed_args", True)


def _leading_options(command: Any, words: Iterable[str]) -> Iterator[str]:
    """Yields the options before the first argument, without their values."""
    valued = {
        name for its in command.params if not getattr(its, "is_flag", False) for name in its.opts
    }
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            return
        yield word
        if word in valued:
            next(rest, None)


def open_standard_streams() -> None:
    """Opens /dev/null for closed standard descriptors; makes stdout and stderr accept any text.

    No other file can then get the number of a standard descriptor. A character that the encoding
    lacks becomes an escape such as `\\u5b66`.

    REQUIRES: no file that this process has opened has a number below 3.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # An open takes the lowest free number.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            mode = "r" if number == 0 else "w"
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  # until the exit
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def write_json(document: bytes) -> None:
    """Writes a JSON document and a newline to stdout, in UTF-8 for any locale."""
    global _json_written
    sys.stdout.flush()
    sys.stdout.buffer.write(document + b"\n")
    _json_written = True


def encodable(text: str) -> bool:
    """Returns whether the encoding of stdout has all of these characters."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _flush_or_discard(stream: TextIO) -> None:
    """Flushes a stream, or discards its text: a failure at exit would print a traceback."""
    try:
        stream.flush()
    except OSError:
        with contextlib.suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
            stream.flush()


def described(error: OSError | FireflyerError) -> str:
    """Returns the message of an error for users; an error number becomes its text."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    if isinstance(error, FileNotFoundError) and not error.filename and not _inside_a_directory():
        return _DELETED
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def need_directory() -> None:
    """Checks that the current directory exists, because torch's libraries abort without one.

    Raises:
        ConfigError: the current directory was deleted.
    """
    if not _inside_a_directory():
        raise ConfigError(_DELETED)


def user_directory() -> Path:
    """Returns $HOME, or the user's directory in the password file if $HOME is not an absolute path.

    Raises:
        ConfigError: neither names a directory, for example because the user id has no entry.
    """
    if os.path.isabs(named := os.environ.get("HOME", "")):
        return Path(named)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        raise ConfigError(
            f"the user {os.getuid()} has no home directory: set HOME or FIREFLYER_HOME, or use "
            "--home"
        ) from None


def _inside_a_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def allow_descriptors() -> None:
    """Raises the limit of open files to the hard limit.

    A service needs a descriptor per connection, and the usual 1,024 are soon used up.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def text(name: str) -> str:
    """Returns a name in a form that JSON can hold: bytes that are not UTF-8 become `\\xff`."""
    return "".join(_escaped(c) if "\ud800" <= c <= "\udfff" else c for c in name)


def _escaped(half: str) -> str:
    """Escapes a lone surrogate, which is how `os.fsdecode` represents a byte that is not UTF-8."""
    byte = ord(half) - 0xDC00
    return f"\\x{byte:02x}" if 0x80 <= byte <= 0xFF else ascii(half)[1:-1]


def plain(words: str) -> str:
    """Returns one line without terminal control: unprintable characters become `\\x1b` etc."""
    if words.isprintable():  # False for lone surrogates
        return words
    line = text(words)
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def fail(kind: str, message: str, code: int) -> int:
    """Reports an error that ends the command; returns the exit code.

    With `--json` the error is also an object on stdout, in place of the result.

    Args:
        kind: type of the error, for programs that read the object of `--json`.
        message: text for users.
        code: exit code.
    """
    if _json_mode and not _json_written:
        import json

        document = {"error": error_fields(kind, message)}
        with contextlib.suppress(OSError):  # stdout is a pipe without a reader, or a full device
            write_json(json.dumps(document, ensure_ascii=False).encode())
            sys.stdout.flush()
    return report(message, code)


def error_fields(kind: str, message: str) -> dict[str, str]:
    """Returns the fields of an error that `--json` prints."""
    return {"type": kind, "message": text(" ".join(message.split()))}


def report(message: str, code: int = 1) -> int:
    """Writes an error as one line to stderr; returns the exit code."""
    with contextlib.suppress(OSError):  # stderr is a pipe without a reader
        sys.stderr.write(f"fireflyer: {plain(' '.join(message.split()))}\n")
    return code

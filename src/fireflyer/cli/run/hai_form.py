"""The HAI form of `run`: options after the last `--`."""

from typing import Any

from typer.exceptions import TyperException


class Misplaced(TyperException):
    """A word after the last `--` of a `run` line is not an option of `run`."""

    exit_code = 2


def hai_form(command: Any, arguments: list[str]) -> list[str]:
    """Moves options after the last `--` of a `run` line to its front; other lines stay the same.

    `run train.py --lr 0.1 -- --nodes 2` becomes `run --nodes 2 train.py --lr 0.1`. If the script's
    own arguments contain a `--`, add one more at the end: `run train.py -- x --`.

    Raises:
        Misplaced: a word after the last `--` is not an option of `run`.
    """
    if arguments[:1] != ["run"] or "--" not in arguments:
        return arguments
    last = len(arguments) - 1 - arguments[::-1].index("--")
    before, options = arguments[1:last], arguments[last + 1 :]
    if not before:
        return arguments
    verb = command.commands["run"]
    context = verb.context_class(verb, info_name="run")
    found, extra, _ = verb.make_parser(context).parse_args(args=list(options))
    stray = [word for word in (found.get("script"), *(found.get("args") or ()), *extra) if word]
    if stray:
        raise Misplaced(
            f"unexpected {stray[0]!r} after the last `--`: expected only options of run; "
            "if the arguments of the script contain `--`, add one more `--` at the end"
        )
    return ["run", *options, *before]

"""The HAI form of `run`: options after the last `--`."""

from typing import Any

from typer.exceptions import TyperException


class Misplaced(TyperException):
    """Something that is no option of `run` stands after its last `--`."""

    exit_code = 2


def hai_form(command: Any, arguments: list[str]) -> list[str]:
    """Moves what follows the last `--` of a `run` line to its front; other lines are returned as they are.

    `run train.py --lr 0.1 -- --nodes 2` becomes `run --nodes 2 train.py --lr 0.1`. A script whose own
    arguments hold a `--` takes a closing one: `run train.py -- x --`.

    Raises:
        Misplaced: something after the last `--` is no option of `run`.
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
            f"after the last `--` only options of run may stand, not {stray[0]!r}; "
            "a script with `--` among its arguments needs one more `--` at the end"
        )
    return ["run", *options, *before]

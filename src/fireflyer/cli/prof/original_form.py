"""The command lines of the original haiprof: `haiprof train.py --time 120`."""

_WITH_VALUE = ("--time", "--recorders", "--warmup", "--trace", "--output")


def original_form(arguments: list[str]) -> list[str]:
    """Turns `SCRIPT.py ARGS... --time 120` into `run --time 120 SCRIPT.py ARGS...`.

    Other lines stay the same. Options of the profiler are taken from the end of the line only; the
    script gets all words before them.
    """
    if not arguments or not arguments[0].endswith(".py"):
        return arguments
    end = len(arguments)
    while end >= 3 and arguments[end - 2] in _WITH_VALUE:
        end -= 2
    return ["run", *arguments[end:], *arguments[:end]]

"""What an installation may leave out."""

import importlib.util


def need_torch(part: str) -> None:
    """Returns where torch is installed; does not import it.

    Raises:
        ModuleNotFoundError: it is not; the message says what to install for `part`.
    """
    if importlib.util.find_spec("torch") is None:
        message = f"{part} needs torch: pip install 'fireflyer[torch]'"
        raise ModuleNotFoundError(message, name="torch")

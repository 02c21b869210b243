"""The network of a command: a preset, or a file of the site."""

from pathlib import Path

from fireflyer.errors import ConfigError
from fireflyer.fabric import infiniband, topologies


def sites(preset: str | None, ibnetdiscover: Path | None) -> list[infiniband.Site]:
    """Returns the planes of a preset, or the network of a file.

    Raises:
        ConfigError: both arguments are given or neither, or the file cannot be read.
        FabricError: no preset has the name, or the text is damaged.
    """
    if (preset is None) == (ibnetdiscover is None):
        raise ConfigError("give one of --preset NAME and --ibnetdiscover FILE")
    if ibnetdiscover is not None:
        return [infiniband.read_net(text(ibnetdiscover), str(ibnetdiscover))]
    return [infiniband.site(net) for net in topologies.preset(preset or "")]


def text(path: Path) -> str:
    """Reads a file.

    Raises:
        ConfigError: the file cannot be read, or is not text.
    """
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None

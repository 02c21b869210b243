"""Settings of the validation of nodes: `validator.toml` of the platform's folder."""

import tomllib
from pathlib import Path

import msgspec

from fireflyer.errors import ConfigError, ValidatorError
from fireflyer.validator.limits import Bound, verify
from fireflyer.validator.model import all_checks, chosen
from fireflyer.validator.pairs import parse_address

NAME = "validator.toml"


class ValidationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of the file. Without a file, only requested validations run."""

    every_s: float = 7 * 86_400.0
    """Time after which an idle node is validated again; 0: never."""
    after_faults: bool = True
    """True if a node is validated after a fault that the rules blame on the node."""
    returns: bool = True
    """True if a node that a rule drained returns to service after a passed validation."""
    retest_s: float = 3600.0
    """Time from the drain, or from the last retest, to the next retest."""
    most_returns: int = 3
    """Maximum returns to service within 30 days; a node that fails more often stays drained."""
    checks: tuple[str, ...] = ()
    """Names of the checks to run; empty: all."""
    limits: dict[str, Bound] = {}
    """Fixed thresholds by figure."""
    peers: dict[str, str] = {}
    """HOST:PORT of the listener of each node with a listener, for the network check."""
    secret_file: str = ""
    """File with the secret of the listeners, at this path on every node."""


REQUESTED_ONLY = ValidationSettings(every_s=0.0, after_faults=False, returns=False)


def load(home: Path) -> ValidationSettings:
    """Returns the settings of a home.

    Raises:
        ConfigError: the file has an error.
    """
    path = home / NAME
    try:
        text = path.read_text(encoding="utf-8")
        found = msgspec.convert(tomllib.loads(text), ValidationSettings)
        checks = all_checks()
        chosen(checks, found.checks)
        verify(found.limits, {figure.name for each in checks for figure in each.figures})
    except FileNotFoundError:
        return REQUESTED_ONLY
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, ValidatorError) as error:
        raise ConfigError(f"{path}: {error}") from None
    for name in ("every_s", "retest_s", "most_returns"):
        if not 0 <= getattr(found, name) < float("inf"):
            raise ConfigError(f"{path}: {name} must be 0 or more, not {getattr(found, name)}")
    if found.peers and not Path(found.secret_file).is_absolute():
        raise ConfigError(
            f"{path}: invalid secret_file {found.secret_file!r}: expected the absolute path of the "
            "secret of the peers"
        )
    for node, address in found.peers.items():
        try:
            parse_address(address)
        except ConfigError as error:
            raise ConfigError(f"{path}: peer of {node!r}: {error}") from None
    return found

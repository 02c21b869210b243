"""Selection of one of several servers. Not thread-safe: the caller must hold a lock."""

from collections.abc import Sequence

from fireflyer.errors import ConfigError, NotPrimary
from fireflyer.rpc.address import Address


class Servers:
    """Addresses of equal servers, or of servers of which one is primary."""

    def __init__(self, addresses: str | Sequence[str]) -> None:
        """Raises ConfigError if there is no address, or if one is invalid."""
        texts = [addresses] if isinstance(addresses, str) else addresses
        self._all = [Address.parse(text) for text in texts]
        if not self._all:
            raise ConfigError("no address given: expected the address of a server")
        self._at = 0

    @property
    def current(self) -> Address:
        return self._all[self._at]

    def fail_over(self, address: Address, error: Exception) -> None:
        """Switches from a failed server to the one that the error names, or to the next address."""
        if address != self.current:
            return  # another call has already switched to another server
        if isinstance(error, NotPrimary) and error.address:
            try:
                named = Address.parse(error.address)
            except ConfigError:
                named = address
            if named != address:
                if named not in self._all:
                    self._all.append(named)
                self._at = self._all.index(named)
                return
        self._at = (self._at + 1) % len(self._all)

"""Which of several equal servers a client talks to. Not thread-safe: the shell locks."""

from collections.abc import Sequence

from fireflyer.errors import ConfigError, NotPrimary
from fireflyer.rpc.address import Address


class Servers:
    """The addresses of servers of which one answers, or any does."""

    def __init__(self, addresses: str | Sequence[str]) -> None:
        """Raises ConfigError where there is none, or it is no address."""
        texts = [addresses] if isinstance(addresses, str) else addresses
        self._all = [Address.parse(text) for text in texts]
        if not self._all:
            raise ConfigError("a client needs the address of a server")
        self._at = 0

    @property
    def current(self) -> Address:
        return self._all[self._at]

    def leave(self, address: Address, error: Exception) -> None:
        """It did not work out with `address`: the one that the error names is next, or the next one."""
        if address != self.current:
            return  # another call has left it already
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

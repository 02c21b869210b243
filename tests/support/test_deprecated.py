"""Old public names work for one release, and warn."""

import importlib
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from fireflyer import deprecated
from fireflyer.errors import ConfigError

SOURCE = Path(deprecated.__file__).parent
MODULES = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): found[1]
    for path in sorted(SOURCE.rglob("*.py"))
    if (found := re.search(r'deprecated.module\(__name__, "([\w.]+)"\)', path.read_text()))
}
STARTED = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): found[1]
    for path in sorted(SOURCE.rglob("*.py"))
    if (found := re.search(r'runpy\.run_module\("([\w.]+)", run_name', path.read_text()))
}


IMPORTED = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): found[1]
    for path in sorted(SOURCE.rglob("*.py"))
    if (found := re.match(r'"""Old path of `([\w.]+)`: [\w ]+ import it\.', path.read_text()))
}


@pytest.mark.parametrize("old", IMPORTED)
def test_an_old_path_has_the_names_of_the_new_one(old: str) -> None:
    """Ranks of an earlier release's fork server look names up when a script first uses them."""
    new = importlib.import_module(IMPORTED[old])
    public = getattr(new, "__all__", [name for name in vars(new) if not name.startswith("_")])
    module = importlib.import_module(old)
    assert all(getattr(module, name) is getattr(new, name) for name in public)


@pytest.mark.parametrize("old", STARTED)
def test_an_old_path_is_started_as_the_new_one(old: str) -> None:
    """Without arguments: both end with the same complaint of the same program."""

    def ends(module: str) -> tuple[int, str]:
        command = [sys.executable, "-m", module]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert STARTED[old] in ran.stderr.replace("/", ".")
        return ran.returncode, ran.stderr.splitlines()[-1]

    assert ends(old) == ends(STARTED[old])


def missing(module: str) -> bool:
    """True if the package after which this module is named is not installed."""
    package = module.rpartition(".")[2]
    return "integrations" in module and package != "hfai" and find_spec(package) is None


@pytest.mark.parametrize("old", MODULES)
def test_an_old_path_gives_the_module_and_warns(old: str) -> None:
    """Where a package of an extra is missing, the new module says so."""
    sys.modules.pop(old, None)
    parent, _, name = old.rpartition(".")
    warns = pytest.warns(DeprecationWarning, match=f"{old} is now {MODULES[old]}")
    try:
        if missing(MODULES[old]):
            with warns, pytest.raises(ConfigError, match=f"^{MODULES[old]} needs the package"):
                importlib.import_module(old)
        else:
            with warns:
                module = importlib.import_module(old)
            assert module is sys.modules[MODULES[old]]
    finally:
        sys.modules.pop(old, None)
        vars(importlib.import_module(parent)).pop(name, None)


def test_an_old_name_gives_the_new_one_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match=r"fireflyer\.deprecated\.old is now"):
        found = deprecated.attribute("fireflyer.deprecated", "old", {"old": "attribute"})
    assert found is deprecated.attribute
    with pytest.raises(AttributeError, match="never"):
        deprecated.attribute("fireflyer.deprecated", "never", {"old": "attribute"})


def test_the_old_name_of_a_device_context_still_works() -> None:
    devices = importlib.import_module("fireflyer.hfreduce.backend.devices")
    with pytest.warns(DeprecationWarning, match="is now .*DeviceContext"):
        assert devices.Seat is devices.DeviceContext

"""MooseFS on this host, from Debian's packages: master, chunk server, mount.

The master does not sync its metadata to disk.
"""

import os
import shutil
import socket
import subprocess
from pathlib import Path

from fireflyer.bench.peers.mounting import Mounted, check_can_mount, debian, fuse
from fireflyer.errors import ConfigError

_PACKAGES = (
    *("moosefs-master", "moosefs-chunkserver", "moosefs-client", "moosefs-common", "libmfsio1"),
    "libfuse3-3",
)


class MooseFS(Mounted):
    """Mounted MooseFS.

    Args:
        folder: folder of the file system's data and its mount point.
        peers: folder of the peers' packages.
    """

    def __init__(self, folder: Path, peers: Path) -> None:
        """Fetches the packages; raises ConfigError if they cannot be fetched or mounted here."""
        super().__init__(folder)
        check_can_mount()
        self._tree = debian(peers / "moosefs", _PACKAGES).absolute()
        self._host = host_address()
        libraries = ":".join(map(str, sorted(self._tree.glob("**/x86_64-linux-gnu"))))
        self._environment = {**fuse(peers), "LD_LIBRARY_PATH": libraries}
        self.title = f"MooseFS {self._version()}"

    def start(self) -> None:
        ports = _free_ports(self._host, 4)
        for name in ("meta", "chunks", "state"):
            (self.folder / name).mkdir()
        shutil.copy(
            self._tree / "var/lib/mfs/metadata.mfs.empty", self.folder / "meta/metadata.mfs"
        )
        self._write("exports", "* / rw,alldirs,admin,maproot=0:0\n")
        self._write("disks", f"{self.folder}/chunks\n")
        owner = "WORKING_USER = root\nWORKING_GROUP = root\nNICE_LEVEL = 0\n"
        master = self._write(
            "master",
            f"{owner}DATA_PATH = {self.folder}/meta\nEXPORTS_FILENAME = {self.folder}/exports.cfg\n"
            f"MATOML_LISTEN_PORT = {ports[0]}\nMATOCS_LISTEN_PORT = {ports[1]}\n"
            f"MATOCL_LISTEN_PORT = {ports[2]}\nDISABLE_OOM_KILLER = 0\n",
        )
        server = self._write(
            "server",
            f"{owner}DATA_PATH = {self.folder}/state\nHDD_CONF_FILENAME = {self.folder}/disks.cfg\n"
            f"HDD_LEAVE_SPACE_DEFAULT = 16MiB\nMASTER_HOST = {self._host}\n"
            f"MASTER_PORT = {ports[1]}\nCSSERV_LISTEN_PORT = {ports[3]}\n",
        )
        programs = self._tree / "usr/sbin"
        self.run([programs / "mfsmaster", "-c", master, "-f", "start"], self._environment)
        self.run([programs / "mfschunkserver", "-c", server, "-f", "start"], self._environment)
        self.wait_for_port(self._host, ports[2])
        mount: list[str | Path] = [self._tree / "usr/bin/mfsmount", "-f", self.root]
        self.run([*mount, "-H", self._host, "-P", str(ports[2])], self._environment, mounts=True)

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / f"{name}.cfg"
        path.write_text(text)
        return path

    def _version(self) -> str:
        """Returns the version, e.g. 3.0.117."""
        program = self._tree / "usr/sbin/mfsmaster"
        done = subprocess.run(
            [program, "-v"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **self._environment},
        )
        words = (done.stdout + done.stderr).split()
        found = next((word for word in words if word[:1].isdigit()), None)
        if found is None:
            raise ConfigError(f"{program} does not run here: {done.stderr.strip()[-200:]}")
        return found.partition("-")[0]


def host_address() -> str:
    """Returns an address of this host other than loopback, because the master rejects 127.0.0.1.

    Raises:
        ConfigError: the host has no such address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # only looks up the route; sends nothing
            found = str(probe.getsockname()[0])
        except OSError:
            found = "127.0.0.1"
    if found.startswith("127."):
        raise ConfigError("MooseFS needs an address of this host other than 127.0.0.1")
    return found


def _free_ports(host: str, count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()

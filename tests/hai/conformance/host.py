"""A server in a process of its own, to be killed."""

import subprocess
import sys
from pathlib import Path

import msgspec

from fireflyer.hai.model.engine import Gang

ROOT = Path(__file__).parents[3]
HOST = """
import asyncio, sys
from pathlib import Path
import msgspec
from fireflyer.hai.model.engine import Gang
from tests.hai.conformance.conftest import make_engine

async def main():
    gang = msgspec.json.decode(sys.argv[2], type=Gang, dec_hook=lambda t, v: t(v))
    engine = make_engine(sys.argv[1], gang.directory.parents[1])
    await engine.launch(gang)
    async for event in engine.events():
        pass

asyncio.run(main())
"""


def host(kind: str, gang: Gang) -> subprocess.Popen[bytes]:
    """Another process that launches the gang and goes on watching it."""
    encoded = msgspec.json.encode(gang, enc_hook=str).decode()
    return subprocess.Popen([sys.executable, "-c", HOST, kind, encoded], cwd=ROOT)


def sigkill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()

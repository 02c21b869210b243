"""GPUs of this machine, read through NVML or given by `fireflyer up --gpus`, and their division
among the virtual nodes of the local engine.

NVML needs the driver, not CUDA. Without a driver the machine has no GPUs. `CUDA_VISIBLE_DEVICES` of
the server limits the GPUs that tasks can get.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fireflyer.errors import ConfigError
from fireflyer.hai.model.devices import MOST, is_type
from fireflyer.log import get_logger

_log = get_logger("hai")

_BRANDS = re.compile(r"\b(?:nvidia|geforce|tesla|quadro|graphics|device)\b")


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that tasks may get."""

    name: str
    """Name in CUDA_VISIBLE_DEVICES: its index in the order of the PCI bus."""
    kind: str = ""
    """Type, e.g. "a100-pcie-40gb"; empty: not known."""
    index: int | None = None
    """Index in NVML; None: the device was given by an option and is not sampled."""


def kind_of(product: str) -> str:
    """Returns the type for a product's name: "NVIDIA A100-PCIE-40GB" -> "a100-pcie-40gb"."""
    text = _BRANDS.sub(" ", product.lower())
    text = re.sub(r"[^a-z0-9._]+", "-", text).strip("-._")
    return text[:64].strip("-._")


def parse_inventory(text: str) -> tuple[Device, ...]:
    """Returns the devices in a list like "8:a100" or "4:a100,4:v100"; a type may be left out.

    Raises:
        ConfigError: the text is not such a list.
    """
    found: list[Device] = []
    for item in text.split(","):
        number, colon, kind = item.strip().partition(":")
        kind = kind.lower()
        if not (number.isascii() and number.isdecimal() and len(number) <= 4) or (
            colon and not is_type(kind)
        ):
            raise ConfigError(f"invalid --gpus {text!r}: expected e.g. 8:a100 or 4:a100,4:v100")
        found += [Device(name=str(len(found) + at), kind=kind) for at in range(int(number))]
    if len(found) > MOST:
        raise ConfigError(f"invalid --gpus {text!r}: expected at most {MOST} GPUs")
    return tuple(found)


def discover(environment: Mapping[str, str] = os.environ) -> tuple[Device, ...]:
    """Returns this machine's GPUs; none if there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return read(pynvml, environment)
    except pynvml.NVMLError as error:
        _log.warning("cannot read the GPUs of this machine (%s); name them with --gpus", error)
        return ()
    finally:
        pynvml.nvmlShutdown()


def read(nvml: Any, environment: Mapping[str, str]) -> tuple[Device, ...]:
    """Returns the devices that an initialised NVML library reports and the environment allows.

    Raises:
        NVMLError: the library fails.
    """
    devices: list[Device] = []
    names: dict[str, int] = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        kind = kind_of(_text(nvml.nvmlDeviceGetName(handle)))
        devices.append(Device(name=str(index), kind=kind, index=index))
        names[_text(nvml.nvmlDeviceGetUUID(handle))] = index
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(devices)
    return tuple(devices[index] for index in _visible(visible, names, len(devices)))


def _visible(text: str, names: Mapping[str, int], count: int) -> list[int]:
    """Returns the indexes in a value of CUDA_VISIBLE_DEVICES. Stops at the first unknown device, as
    CUDA does."""
    found: list[int] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        if item.isascii() and item.isdecimal():
            index = int(item)
        else:
            index = next((at for name, at in names.items() if name.startswith(item)), count)
        if index >= count or index in found:
            break
        found.append(index)
    return sorted(found)


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def default_nodes(devices: Sequence[Device], without: int) -> int:
    """Returns the default number of virtual nodes: one per type of GPU, or `without` if there are
    no GPUs."""
    return len({device.kind for device in devices}) or without


def divide(devices: Sequence[Device], nodes: int) -> list[tuple[Device, ...]]:
    """Divides devices among virtual nodes as evenly as possible: each node gets adjacent devices of
    one type.

    Raises:
        ConfigError: there are more types than nodes.
    """
    groups: dict[str, list[Device]] = {}
    for device in devices:
        groups.setdefault(device.kind, []).append(device)
    if len(groups) > nodes:
        raise ConfigError(
            f"this machine has GPUs of {len(groups)} types ({', '.join(groups)}), and a node has "
            f"GPUs of one type: start with --nodes {len(groups)} or more"
        )
    shares = dict.fromkeys(groups, 1)
    for _ in range(nodes - len(groups) if groups else 0):
        most = max(groups, key=lambda kind: len(groups[kind]) / shares[kind])
        shares[most] += 1
    found: list[tuple[Device, ...]] = []
    for kind, parts in shares.items():
        group = groups[kind]
        each, more = divmod(len(group), parts)
        for part in range(parts):
            size = each + (part < more)
            found.append(tuple(group[:size]))
            del group[:size]
    return found + [()] * (nodes - len(found))

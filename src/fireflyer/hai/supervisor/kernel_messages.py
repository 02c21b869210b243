"""Parser of kernel log lines about a node. Pure; accepts any bytes and ignores unknown lines.

Formats: /dev/kmsg as in Documentation/ABI/testing/dev-kmsg of Linux; Xid lines as in NVIDIA's "XID
Errors" guide; network lines as the mlx5 driver and the usual Ethernet drivers print them; EDAC and
the out of memory killer as Linux prints them.
"""

import re

from fireflyer.hai.model.observations import KernelObservation, Memory, Network, OutOfMemory, Xid

LINE_BYTES = 1024
"""Maximum number of bytes kept of a line."""

_RECORD = re.compile(rb"(\d{1,20}),(\d{1,20}),(\d{1,20}),[^;]*;")
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]{1,32})[^)]{0,64}\): (\d{1,5})\b(.*)")
_PID = re.compile(r"\bpid='?(\d{1,10})\b")
_OOM = re.compile(r"(cgroup )?[Oo]ut of memory: Killed process (\d{1,10})\b")
_LINK = re.compile(
    r"\b(?:mlx5_core|mlx4_en|mlx4_core|ice|i40e|ixgbe|igb|e1000e|bnxt_en|tg3|r8169)\b"
    r"[ :]([\w:.\- ()]{0,80}?):? (?:NIC )?(?:Link is |[Ll]ink )([Uu]p|[Dd]own)\b"
)
_MLX_ERROR = re.compile(
    r"\bmlx5_core ([0-9A-Fa-f:.]{4,20})\b.*(?:Cable (?:unplugged|error)|health compromised|"
    r"assert_var|Health issue observed|synd 0x|fatal error)",
)
_EDAC = re.compile(r"\bEDAC (?:\w+ )?MC\d+: (\d+) (CE|UE)\b")
_MCE = re.compile(r"\[Hardware Error\].*\b(Uncorrected|Corrected|Deferred) error", re.IGNORECASE)


def message(record: bytes) -> str:
    """Returns the text of a record of /dev/kmsg, or of a log file line, without control
    characters."""
    head = _RECORD.match(record)
    if head is not None:
        record = record[head.end() :]
    text = record.split(b"\n", 1)[0][:LINE_BYTES].decode("utf-8", "replace")
    return "".join(c if c.isprintable() else " " for c in text).strip()


def parse(record: bytes, node: str, wall: float) -> KernelObservation | None:
    """Returns the observation in a record or line; None: the line is not recognised."""
    text = message(record)
    if found := _XID.search(text):
        pid = _PID.search(found[3])
        return Xid(
            node=node, wall=wall, code=int(found[2]), device=found[1], line=text,
            pid=None if pid is None else int(pid[1]),
        )  # fmt: skip
    if found := _OOM.search(text):
        return OutOfMemory(
            node=node, wall=wall, pid=int(found[2]), line=text, limited=found[1] is not None
        )
    if found := _LINK.search(text):
        device = found[1].strip().strip(":").split(" ")[-1] or "?"
        return Network(node=node, wall=wall, device=device, state=found[2].lower(), line=text)
    if found := _MLX_ERROR.search(text):
        return Network(node=node, wall=wall, device=found[1].strip(":"), state="error", line=text)
    if found := _EDAC.search(text):
        return Memory(node=node, wall=wall, corrected=found[2] == "CE", line=text)
    if found := _MCE.search(text):
        corrected = found[1].lower() != "uncorrected"
        return Memory(node=node, wall=wall, corrected=corrected, line=text)
    return None

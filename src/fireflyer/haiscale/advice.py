"""What would hide communication that shows, with what it could gain at best."""

from collections.abc import Iterator

from fireflyer.haiscale.facts import WIRE_BYTES, Facts

EXPOSED = 0.05  # of the step; less is left alone
WORTH = 0.03  # of the step: what a proposal must gain
_FEW_BUCKETS, _MANY_BUCKETS = 3, 500


def advise(facts: Facts, step_s: float, exposed_s: float, under_way_s: float) -> list[str]:
    """Lines for people; none where less than EXPOSED of a step is exposed.

    Bounds behind the gains: a step lasts at least as long as the work without communication (step - exposed),
    and at least as long as the communication, which as many bytes as it sends. Communication is taken to last
    as long as reductions were under way, which is never too short.
    """
    if exposed_s <= EXPOSED * step_s:
        return []
    warning = (
        f"warning: {exposed_s * 1e3:,.1f} ms of each step ({exposed_s / step_s:.0%}) are spent waiting for "
        "communication. What would hide it:"
    )
    proposals = sorted(_proposals(facts, step_s, exposed_s, under_way_s), reverse=True)
    return [warning, *(f"  {words} (up to {gain:.0%} of the step)" for gain, words in proposals)]


def _proposals(
    facts: Facts, step_s: float, exposed_s: float, under_way_s: float
) -> Iterator[tuple[float, str]]:
    local_s = step_s - exposed_s
    lasts_s = min(under_way_s, step_s)

    def gain(new_s: float) -> float:
        return 1 - max(new_s, local_s) / step_s

    found = []
    if not facts.crosses and not facts.sharded:
        words = "optimizer=: communication goes on into the next forward"
        found.append((gain(lasts_s), words))
    if facts.must_send and facts.element_bytes <= 4:  # codecs leave float64 alone
        for wire in ("bf16", "int8"):
            share = WIRE_BYTES[wire] / facts.element_bytes
            if share < 1:
                words = f'wire="{wire}": {share:.2g} of the bytes between hosts'
                found.append((gain(step_s - lasts_s * (1 - share)), words))
    words = "no_sync() around all but the last of 2 micro-batches: half as many reductions a sample"
    found.append((gain(step_s - exposed_s / 2), words))
    if facts.reductions <= _FEW_BUCKETS:
        words = (
            f"smaller bucket_bytes: {facts.reductions} bucket(s) start when backward is nearly over"
        )
        found.append((gain(local_s), words))
    elif facts.reductions >= _MANY_BUCKETS:
        words = f"larger bucket_bytes: {facts.reductions} reductions a step cost their calls"
        found.append((gain(local_s), words))
    hosts = facts.group.hosts
    if facts.sharded and len(hosts) > 1 and max(map(len, hosts)) > 1:
        words = (
            "HSDP: shard inside each host, replicate between hosts; parameters stay off the network"
        )
        found.append((gain(local_s), words))
    return ((part, words) for part, words in found if part >= WORTH)

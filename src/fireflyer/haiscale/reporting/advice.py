"""Advice on settings that would hide exposed communication, with upper bounds of their gains."""

from collections.abc import Iterator

from fireflyer.haiscale.reporting.facts import WIRE_BYTES, Facts

EXPOSED = 0.05  # fraction of the step; a smaller exposed fraction needs no advice
WORTH = 0.03  # minimum gain of a proposal, as a fraction of the step
_FEW_BUCKETS, _MANY_BUCKETS = 3, 500


def advise(facts: Facts, step_s: float, exposed_s: float, under_way_s: float) -> list[str]:
    """Returns lines of text; none if less than EXPOSED of a step is exposed.

    Gains follow from two bounds. A step lasts at least as long as its work without communication
    (step - exposed). It also lasts at least as long as its communication, which is proportional to
    the bytes sent. The time with some communication in flight serves as an upper bound of the
    communication's duration.
    """
    if exposed_s <= EXPOSED * step_s:
        return []
    warning = (
        f"warning: {exposed_s * 1e3:,.1f} ms of each step ({exposed_s / step_s:.0%}) are spent waiting for "
        "communication."
    )
    proposals = sorted(_proposals(facts, step_s, exposed_s, under_way_s), reverse=True)
    if not proposals:
        return [f"{warning} No setting would hide {WORTH:.0%} of a step: give each step more work"]
    lines = (f"  {words} (up to {gain:.0%} of the step)" for gain, words in proposals)
    return [f"{warning} Settings that would hide it:", *lines]


def _proposals(
    facts: Facts, step_s: float, exposed_s: float, under_way_s: float
) -> Iterator[tuple[float, str]]:
    local_s = step_s - exposed_s
    lasts_s = min(under_way_s, step_s)

    def gain(new_s: float) -> float:
        return 1 - max(new_s, local_s) / step_s

    found = []
    if not facts.deferred:
        words = "optimizer=: communication overlaps the next forward"
        found.append((gain(lasts_s), words))
    gathers = facts.must_gather / facts.must_send if facts.must_send else 0.0
    if gathers < 1 and facts.must_send and facts.element_bytes <= 4:  # codecs leave float64 alone
        for wire in ("bf16", "int8"):
            share = WIRE_BYTES[wire] / facts.element_bytes
            if share < 1:
                what = "gradients' bytes" if facts.sharded else "bytes"
                words = f'wire="{wire}": {share:.2g} of the {what} between hosts'
                found.append((gain(step_s - lasts_s * (1 - gathers) * (1 - share)), words))
    if gathers and facts.gathered_bytes > 2:
        share = 2 / facts.gathered_bytes
        words = f"gather_dtype=torch.bfloat16: {share:.2g} of the parameters' bytes between hosts"
        found.append((gain(step_s - lasts_s * gathers * (1 - share)), words))
    words = "no_sync() around all but the last of 2 micro-batches: half as many reductions a sample"
    found.append((gain(step_s - exposed_s / 2), words))
    few = facts.reductions <= _FEW_BUCKETS
    if few or facts.reductions >= _MANY_BUCKETS:
        how = "units by auto_wrap_policy" if facts.sharded else "bucket_bytes"
        words = (
            f"smaller {how}: {facts.reductions} reduction(s) start when backward is nearly over"
            if few
            else f"larger {how}: {facts.reductions} reductions a step cost their calls"
        )
        found.append((gain(local_s), words))
    if gathers and len(facts.hosts) > 1 and max(map(len, facts.hosts)) > 1:
        words = (
            "HSDP: shard inside each host, replicate between hosts; parameters stay off the network"
        )
        found.append((gain(local_s), words))
    return ((part, words) for part, words in found if part >= WORTH)

"""Models, clusters and layouts to plan, and the paper's measured points."""

import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fireflyer.errors import ConfigError
from fireflyer.haiscale.pipeline import schedules


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Transformer model and its global batch.

    Attributes:
        active: number of parameters that a token passes; fewer than `parameters` for a mixture of
            experts.
        batch: number of sequences per step.
        efficiency: share of the GPUs' `flops` that a stage reaches while it computes.
        pp: number of ranks of a pipeline if a layout does not give `pp`.
        experts, top_k: number of routed experts of a layer, and number of them that a token passes;
            0: none.
        expert_parameters: number of parameters of all routed experts of all layers.
    """

    layers: int
    hidden: int
    heads: int
    parameters: float
    active: float
    sequence: int
    batch: int
    efficiency: float
    pp: int = 1
    experts: int = 0
    top_k: int = 0
    expert_parameters: float = 0.0


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes with one network card.

    Attributes:
        flops: peak of a GPU, in operations per second.
        memory: bytes of a GPU.
        card: bytes per second on the network card, each way.
        allreduce: bytes of gradients per second that an allreduce between nodes completes.
        pair: bytes per second between the two GPUs of a bridge, each way.
        bus: bytes per second between other GPUs of a node, each way.
    """

    gpus_per_node: int
    flops: float
    memory: float
    card: float
    allreduce: float
    pair: float = 300e9
    bus: float = 9e9


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Division of a run over its GPUs.

    Attributes:
        pp: number of ranks of a pipeline.
        dp: number of data-parallel replicas.
        micro: number of sequences in a micro-batch.
        chunks: number of stages per rank.
        tp: number of GPUs of a node that share each layer.
        ep: number of data-parallel ranks that share the experts.
    """

    pp: int
    dp: int
    micro: int = 1
    schedule: str = schedules.PIPEDREAM
    chunks: int = 1
    placement: str = "staggered"
    tp: int = 1
    ep: int = 1

    def text(self) -> str:
        shares = "".join(f",{n}={getattr(self, n)}" for n in ("tp", "ep") if getattr(self, n) > 1)
        extra = f",chunks={self.chunks}" if self.chunks > 1 else ""
        return (
            f"pp={self.pp},dp={self.dp}{shares},micro={self.micro},schedule={self.schedule}{extra}"
        )


CLUSTERS = {
    "fire-flyer": Cluster(gpus_per_node=8, flops=220e12, memory=40e9, card=25e9, allreduce=6.3e9)
}
"""Presets of clusters. The paper's nodes have 8 A100 (PCIe, 40 GB) and one 200 Gbit/s card;
HFReduce's rate is the lower end of the paper's range. NVLink joins pairs with 600 GB/s, both ways
together. Between other GPUs a write crosses the CPU, as from a GPU to the card, at about 9 GB/s
(paper, section IV)."""

MODELS = {
    "llama-13b": Model(40, 5120, 40, 13.02e9, 13.02e9, 2048, 4096, 0.0, 4),
    "deepseek-moe-16b": Model(28, 2048, 16, 16.4e9, 2.8e9, 4096, 4608, 0.0, 10, 64, 6, 14.95e9),
    "gpt2-medium": Model(24, 1024, 16, 0.355e9, 0.355e9, 1024, 512, 0.45, 1),
}
"""Presets of models. An efficiency of 0 means that the efficiency is calibrated from the model's
first point in PAPER.

DeepSeekMoE-16B has 64 routed experts of 8.65e6 parameters in each of 27 layers; a token passes 6 of
them (arXiv 2401.06066).
"""

PAPER = {
    "llama-13b": ((64, 64.118), (256, 17.448), (512, 9.717)),
    "deepseek-moe-16b": ((40, 79.615), (320, 10.71), (640, 6.535)),
}
"""Measured (GPUs, seconds per step), from the paper's Figures 9a and 9b."""

OPTIONAL = ("experts", "top_k", "expert_parameters")
"""Fields that are 0 for a model without experts."""

Read = TypeVar("Read", Model, Cluster)


def read(option: str, name: str, known: dict[str, Read], kind: type[Read]) -> Read:
    """Returns a preset, or the contents of a TOML file with the fields of `kind`.

    Raises:
        ConfigError: neither a preset nor a file has this name, or the file is invalid.
    """
    if name in known:
        return known[name]
    try:
        found = msgspec.convert(tomllib.loads(Path(name).read_text()), kind)
    except OSError as error:
        raise ConfigError(
            f"invalid {option} {name!r}: expected {', '.join(known)} or a readable file ({error})"
        ) from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"invalid {option} {name!r}: expected TOML with "
            f"{', '.join(kind.__struct_fields__)}: {error}"
        ) from None
    for field in kind.__struct_fields__:
        least = "at least 0" if field in OPTIONAL else "above 0"
        value = getattr(found, field)
        if value < 0 or (value == 0 and field not in OPTIONAL):
            raise ConfigError(f"invalid {option} {name!r}: expected {field} {least}, got {value}")
    return found


def layout_of(text: str, model: Model, gpus: int) -> Layout:
    """Parses "pp=4,dp=16"; absent values follow from the model and the number of GPUs.

    Raises:
        ConfigError: the text is invalid, or the layout needs another number of GPUs.
    """
    fields: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in Layout.__struct_fields__ or not value or key in fields:
            raise ConfigError(
                f"invalid --layout '{text}': expected KEY=VALUE,... with each of "
                f"{', '.join(Layout.__struct_fields__)} at most once"
            )
        fields[key] = int(value) if value.isdecimal() else value
    each = gpus // fields["tp"] if _positive(fields.get("tp")) else gpus
    fields.setdefault("pp", each // fields["dp"] if _positive(fields.get("dp")) else model.pp)
    if _positive(fields["pp"]):
        fields.setdefault("dp", each // fields["pp"])
    try:
        layout = msgspec.convert(fields, Layout)
    except msgspec.ValidationError as error:
        raise ConfigError(f"invalid --layout '{text}': {error}") from None
    if layout.pp * layout.dp * layout.tp != gpus or gpus < 1:
        tensor = f" times tp {layout.tp}" if layout.tp > 1 else ""
        raise ConfigError(
            f"invalid --layout '{text}': pp {layout.pp} times dp {layout.dp}{tensor} is not "
            f"{gpus} GPUs"
        )
    return layout


def _positive(value: object) -> bool:
    return isinstance(value, int) and value > 0

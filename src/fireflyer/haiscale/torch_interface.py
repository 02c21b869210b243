"""Arguments of torch's wrappers that our wrappers accept, ignore or reject, with advice."""

from collections.abc import Mapping
from typing import NamedTuple

from fireflyer.errors import ConfigError
from fireflyer.haiscale.validation import check_count, given


class TorchArgument(NamedTuple):
    """Treatment of an argument of torch's wrapper.

    Attributes:
        harmless: values that have no effect here.
        instead: advice for other values.
    """

    harmless: tuple[object, ...]
    instead: str


_ANY = TorchArgument((), "")  # without advice, every value is accepted and ignored

DDP_ARGUMENTS = {
    "doors": _ANY,  # the old name of members_file
    "device_ids": _ANY,  # the parameters' device is used; `check_arguments` rejects several
    "output_device": _ANY,
    "dim": TorchArgument((0,), "the caller divides batches"),
    "init_sync": TorchArgument((True,), "all ranks start with the first rank's values"),
    "bucket_cap_mb": _ANY,  # `bucket_bytes_of` reads it
    "check_reduction": _ANY,
    "find_unused_parameters": _ANY,  # every backward finds them
    "gradient_as_bucket_view": _ANY,  # gradients are always views
    "mixed_precision": TorchArgument((None,), "use torch.autocast, and wire= for the network"),
    "skip_all_reduce_unused_params": _ANY,
}

FSDP_ARGUMENTS = {
    "doors": _ANY,  # the old name of members_file
    "device_id": _ANY,
    "use_orig_params": _ANY,  # always true here
    "limit_all_gathers": _ANY,
    "sync_module_states": TorchArgument((True,), "use broadcast_from_first="),
    "sharding_strategy": TorchArgument(
        (None,),
        "use reshard_after_forward=True (FULL_SHARD) or False (SHARD_GRAD_OP), mesh=hybrid_mesh "
        "(HYBRID_SHARD), or DistributedDataParallel (NO_SHARD)",
    ),
    "device_mesh": TorchArgument((None,), "use mesh="),
    "ignored_modules": TorchArgument((None,), "wrap the other modules one by one"),
    "ignored_states": TorchArgument((None,), "wrap the other modules one by one"),
    "ignored_parameters": TorchArgument((None,), "wrap the other modules one by one"),
}


def bucket_bytes_of(bucket_bytes: int | None, torchs: Mapping[str, object], default: int) -> int:
    """Returns the size of a bucket: `bucket_bytes`, else torch's `bucket_cap_mb` (MiB), else `default`.

    Raises:
        ConfigError: both are given, or one of them is not a positive number.
    """
    mib = torchs.get("bucket_cap_mb")
    if mib is None:
        size = default if bucket_bytes is None else bucket_bytes
        check_count("bucket_bytes", size, 1)
        return size
    if bucket_bytes is not None:
        raise ConfigError("bucket_bytes= and bucket_cap_mb= exclude each other")
    if isinstance(mib, bool) or not isinstance(mib, int | float) or not 0 < mib < float("inf"):
        raise ConfigError(f"invalid bucket_cap_mb {given(mib)}: expected MiB, a number above 0")
    return max(1, round(mib * (1 << 20)))


def check_arguments(
    wrapper: str, known: Mapping[str, TorchArgument], found: Mapping[str, object]
) -> None:
    """Accepts arguments of torch's wrapper that have no effect here.

    Raises:
        TypeError: torch does not have this argument either.
        ConfigError: the argument requests something that is set in another way here; the error
            tells how.
    """
    for name, value in found.items():
        if name not in known:
            raise TypeError(f"{wrapper}() got an unexpected keyword argument {name!r}")
        if name == "device_ids" and isinstance(value, list | tuple) and len(value) > 1:
            raise ConfigError(f"{wrapper}: device_ids={given(value)}: start a rank for each device")
        harmless, instead = known[name]
        if instead and not any(value is one or value == one for one in harmless):
            raise ConfigError(f"{wrapper}: {name}={given(value)} is not supported: {instead}")

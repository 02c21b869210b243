"""Registration of the backend "hfreduce" with torch. Imports torch only when a group is created."""

import sys
from typing import Any


def register_backend() -> None:
    """Registers the backend "hfreduce" with torch. torch's `torch.backends` entry point calls this.

    Never raises, because an exception here would break `import torch` in every program.
    """
    distributed = sys.modules.get("torch.distributed")
    backend = getattr(distributed, "Backend", None)
    if backend is None or hasattr(backend, "HFREDUCE"):
        return  # torch was built without distributed, or the backend is registered already
    backend.register_backend("hfreduce", _create_group, extended_api=True, devices=["cpu", "cuda"])
    rendezvous = sys.modules.get("torch.distributed.rendezvous")
    handlers = getattr(rendezvous, "_rendezvous_handlers", {})
    if "env" in handlers:
        from fireflyer.hfreduce.reform import join

        join.install_rendezvous_handler(handlers, distributed.Store)  # type: ignore[union-attr]


def _create_group(options: Any, _backend_options: object) -> Any:
    from torch.distributed import GroupMember

    from fireflyer.hfreduce.backend.process_group import ProcessGroupHFReduce
    from fireflyer.hfreduce.reform import join

    if join.wanted() and GroupMember.WORLD is None:  # this group becomes the default group
        return ProcessGroupHFReduce.join(join.addresses(), options.timeout)
    return _rendezvous(options, default=GroupMember.WORLD is None)


_life = 1
"""Number of default groups that the present store has served, including the present group."""


def _rendezvous(options: Any, default: bool) -> Any:
    """Creates a group through its store.

    A store may outlive a default group: torchrun keeps it between `destroy_process_group` and
    `init_process_group`. So each default group and its sub-groups have their own keys.
    """
    global _life
    from torch.distributed import PrefixStore

    from fireflyer.hfreduce.backend.process_group import ProcessGroupHFReduce
    from fireflyer.hfreduce.rendezvous.creation_order import CreationOrder, places
    from fireflyer.torch_internals.distributed import default_store

    rank, size, members = options.group_rank, options.group_size, options.global_ranks_in_group
    if default:
        lives = f"lives of rank {rank} of {size}"
        _life = options.store.add(lives, 1)
        places.forget()
    store = options.store if _life == 1 else PrefixStore(f"life {_life}", options.store)
    try:
        # torch names a group by a number or by a hash of its members. Only a number can stand for
        # different groups on different ranks, so only groups with a number are checked.
        if default or not members or not str(options.group_id).isdigit():
            return ProcessGroupHFReduce(store, rank, size, options.timeout)
        job = PrefixStore(f"life {_life}", default_store())
        order = CreationOrder(store, job, options.group_id, members[rank], members)
        return ProcessGroupHFReduce(store, rank, size, options.timeout, order.check)
    except BaseException:
        if default:
            options.store.add(lives, -1)  # the next attempt gets the same number
        raise

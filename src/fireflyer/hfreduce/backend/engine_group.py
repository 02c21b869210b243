"""The base of the torch process group: engine, connections, works, reform, and failure handling."""

import datetime
import os
from collections.abc import Callable, Sequence
from typing import Any, Self

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fireflyer._native import hfreduce as native
from fireflyer.errors import ConfigError, FireflyerError, RankFailed
from fireflyer.hfreduce.backend import devices, flight_recorder, profiler_events
from fireflyer.hfreduce.backend.compiler_exclusion import uncompiled
from fireflyer.hfreduce.backend.completion import CompletionThreads
from fireflyer.hfreduce.backend.in_flight import InFlight
from fireflyer.hfreduce.backend.tensors import DTYPES, Buffers, seconds_of, will_wait
from fireflyer.hfreduce.backend.work import OVER, Joined, Message, Work
from fireflyer.hfreduce.reform.handles import Member
from fireflyer.hfreduce.reform.reform import GRACE_S, join, reform
from fireflyer.hfreduce.rendezvous import establish
from fireflyer.hfreduce.rendezvous.handshake import Purpose
from fireflyer.hfreduce.wire import Wire
from fireflyer.log import get_logger
from fireflyer.torch_internals.distributed import ErrorType, world


@uncompiled
class EngineGroup(ProcessGroup):
    """A torch process group without its collectives; see `ProcessGroupHFReduce`."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: datetime.timedelta,
        still_useful: Callable[[], None] = lambda: None,
    ) -> None:
        seconds = timeout.total_seconds()
        prefixed = dist.PrefixStore("hfreduce", store)
        connection = establish.connect(prefixed, rank, size, seconds, _master(), still_useful)
        self._begin(connection, timeout)

    @classmethod
    def join(
        cls, addresses: Sequence[str], timeout: datetime.timedelta, *, secret: str | None = None
    ) -> Self:
        """Joins a running group when its members next call `reform`.

        Args:
            addresses: `join_address` values of members; one member that answers is enough.
            timeout: limit for this call, and for the operations of the group.
            secret: the group's secret; default FIREFLYER_SECRET.

        Raises:
            ConfigError: the secret is missing, or an address is invalid.
            DeadlineExceeded, PeerLost, ProtocolMismatch: see `fireflyer.hfreduce.reform.reform.join`.
        """
        secret = secret or os.environ.get("FIREFLYER_SECRET")
        if not secret:
            raise ConfigError("joining a group needs its secret: set FIREFLYER_SECRET")
        group = cls.__new__(cls)
        seconds = timeout.total_seconds()
        master = addresses[0].partition(":")[0] if addresses else _master()
        group._begin(join(addresses, secret.encode(), seconds, master=master), timeout)
        group.joined = True
        return group

    @classmethod
    def alone(cls, timeout: datetime.timedelta) -> Self:
        """Creates a group of this process only, which `configure` can enlarge.

        Args:
            timeout: limit for the operations of the group, and for `configure`.
        """
        group = cls.__new__(cls)
        store = dist.HashStore()
        group._begin(establish.connect(store, 0, 1, timeout.total_seconds()), timeout)
        return group

    def _begin(self, connection: establish.Connection, timeout: datetime.timedelta) -> None:
        ProcessGroup.__init__(self, connection.rank, connection.world)  # type: ignore[call-arg]
        self._use(connection)
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        self._devices = [torch.device(kind) for kind in kinds]
        self._process = os.getpid()
        self._group_name = ""
        self._group_description = ""
        self._timeout_s = timeout.total_seconds()
        self._collectives, self._messages = InFlight(in_order=True), InFlight(in_order=False)
        self._settler = CompletionThreads()
        self._member: Member | None = None

    def _use(self, connection: establish.Connection) -> None:
        """Sets the connected engine group that this object uses."""
        self._connection = connection
        self._engine = connection.group
        self._rank, self._size = connection.rank, connection.world
        self._between_hosts = len(connection.topology.hosts) > 1
        self._linked: set[tuple[Any, ...]] = set()
        self._stagers: dict[native.Device, native.Stager] = {}
        self._recorded = False

    # Methods that torch calls both on a group and on its backend: this object is both.

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "hfreduce"

    def name(self) -> str:
        return "hfreduce"

    # torch keeps rank and size in a group's backends; this object is its group's only backend.

    def getRank(self) -> int:  # noqa: N802
        return self._rank

    def getSize(self) -> int:  # noqa: N802
        return self._size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._group_description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._group_description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return self._devices

    def _get_backend(self, device: torch.device) -> Any:
        return self

    wire: Wire | None = None
    """Default wire codec of sums; must be the same on all ranks."""

    joined = False
    """True if this process joined a group that was already running."""

    supports_splitting = False
    supports_coalescing = False
    bound_device_id = None

    @property
    def network_bytes_sent(self) -> int:
        """Number of bytes that this rank has sent to other hosts so far."""
        return self._engine.network_bytes_sent

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each host; hosts and ranks are in order of rank."""
        return self._connection.topology.hosts

    def flight_records(self) -> list[dict[str, Any]]:
        """Returns the group's latest operations on this rank, oldest first; see `flight_recorder`."""
        return self._engine.records()

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Sets the timeout of operations that start from now on."""
        self._timeout_s = timeout.total_seconds()
        self._engine.set_timeout(self._timeout_s)

    _set_default_timeout = set_timeout

    def set_rules(self, rules: Sequence[native.Rule]) -> None:
        """Sets the rules that choose the algorithms between hosts.

        The engine's own rules decide calls to which no rule applies. Every rank must make this call
        with the same rules, while it has no operation in flight.
        """
        self._engine.set_rules(list(rules))
        self._linked.clear()  # other algorithms send to other peers

    def abort(self) -> None:
        """Ends operations here and on all peers with an error; the group is unusable afterwards."""
        self._recorded = True  # a deliberate abort needs no flight record
        self._engine.abort()
        self._connection.watch.announce("the group was aborted")
        self._connection.p2p.fail("the group was aborted")

    def errored(self) -> Exception | None:
        """Returns the group's error, or None. torchft's process groups have the same method."""
        try:
            self._engine.rethrow()
        except FireflyerError as error:
            return error
        return None

    def get_error(self) -> ErrorType:
        """Returns the kind of the error that `errored` returns, as torch's backends do."""
        error = self.errored()
        if error is None:
            return ErrorType.SUCCESS
        return ErrorType.REMOTE_ERROR if isinstance(error, RankFailed) else ErrorType.COMM_ERROR

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        """Forms this group anew, in place, from ranks that another service has agreed on.

        torchft's manager makes this call, with these arguments, after each quorum. The call needs
        the store at `store_addr`; `reform` agrees among the members and needs no store. Operations
        in flight end with an error.

        Args:
            store_addr: "host:port/prefix" of a TCPStore. Only the ranks of the new group may use
                the prefix, each for one `configure`.
            rank, world_size: rank of this process, and number of ranks, in the new group.
            replica_id, quorum_id, group_rank, group_world_size, global_ranks: logged, otherwise
                unused.

        Raises:
            ConfigError: `store_addr` has another form.
            DeadlineExceeded, RankFailed, ProtocolMismatch, NoSpace, CollectiveError: see
                `establish.connect`.
        """
        get_logger("hfreduce").debug(
            "configure: replica %s is rank %d of %d, quorum %s, group rank %s of %s, global ranks %s",
            *(replica_id, rank, world_size, quorum_id, group_rank, group_world_size, global_ranks),
        )
        self._form_at(store_addr, rank, world_size, self._timeout_s)

    def _form_at(self, store_addr: str, rank: int, world_size: int, seconds: float) -> None:
        address, _, prefix = store_addr.partition("/")
        host, _, port = address.rpartition(":")
        if not host or not prefix or not port.isdecimal():
            raise ConfigError(f"invalid store_addr {store_addr!r}: expected host:port/prefix")
        if any(not work.is_completed() for work in (*self._collectives, *self._messages)):
            self.abort()
        self._let_go()
        self._connection.close()
        limit = datetime.timedelta(seconds=seconds)
        store = dist.TCPStore(host, int(port), None, False, limit, wait_for_workers=False)
        prefixed = dist.PrefixStore(prefix, store)
        self._use(establish.connect(prefixed, rank, world_size, seconds, host))
        self._engine.set_timeout(self._timeout_s)
        self._tell_torch()

    @property
    def supports_reconfigure(self) -> bool:
        """Returns True. The name is torch's; managers such as torchft's read it."""
        return True

    def get_reconfigure_handle(self) -> str:
        """Returns this member's handle, which all members pass to `reconfigure`. Opens a store at
        the first call."""
        if self._member is None:
            self._member = Member(self.join_address.rpartition(":")[0])
        return msgspec.json.encode(self._member.handle).decode()

    def reconfigure(self, opts: Any) -> Work:
        """Forms this group anew, in place, like torch's groups from 2.14 on. All members call it.

        Args:
            opts: ReconfigureOptions of torch or torchft: `handles`, a list in order of rank;
                `uuid`, a number that differs each time; `timeout`, by default the group's.

        Returns:
            A work that has ended.

        Raises:
            ConfigError: `handles` is not a list, or lacks this member's handle.
            DeadlineExceeded, RankFailed, ProtocolMismatch, NoSpace, CollectiveError: see
                `configure`.
        """
        self.get_reconfigure_handle()
        assert self._member is not None
        place = self._member.place(opts.handles, opts.uuid)
        self._form_at(*place, seconds_of(opts) or self._timeout_s)
        return OVER

    @property
    def join_address(self) -> str:
        """Address that a newcomer passes to `join`; the next `reform` admits that newcomer."""
        return self._connection.join_address

    @property
    def join_addresses(self) -> list[str]:
        """`join_address` of every member, by rank. Each address identifies a process while that
        process lives."""
        return self._connection.join_addresses

    @property
    def epoch(self) -> int:
        """Epoch of the agreed view: initially 0, higher after each `reform`."""
        return self._connection.epoch

    @property
    def newcomers_wait(self) -> bool:
        """True if processes wait at this member to be admitted at the next `reform`."""
        return bool(self._connection.slot.join_listener.waiting())

    def reform(
        self,
        timeout: datetime.timedelta,
        *,
        quorum: int | None = None,
        grace: datetime.timedelta | None = None,
    ) -> list[int]:
        """Forms this group anew, in place, from the live members and the waiting newcomers.

        The call is collective among these members; it needs neither a store nor rank 0. Survivors
        keep their order and newcomers follow them: `rank()` and `size()` change. Operations that
        were in flight have ended with an error.

        Args:
            timeout: limit for this call.
            quorum: number of old members that must agree. Default: more than half, or half with
                rank 0. With a smaller quorum, both parts of a partitioned network may continue.
            grace: how long to wait until all members that are not known to be dead call `reform`.

        Returns:
            Previous rank of each new rank; -1 for newcomers.

        Raises:
            DeadlineExceeded: too few members took part for a quorum.
            RankFailed: names this rank itself, because the others formed the group without it.
            ConfigError: this group is closed, or an earlier `reform` of it failed.
        """
        self._let_go()
        before = self._connection.infos
        grace_s = GRACE_S if grace is None else grace.total_seconds()
        seconds = timeout.total_seconds()
        self._use(reform(self._connection, seconds, quorum=quorum, grace_s=grace_s))
        self._engine.set_timeout(self._timeout_s)
        self._tell_torch()
        return [before.index(info) if info in before else -1 for info in self._connection.infos]

    def _tell_torch(self) -> None:
        """Updates torch's map of group ranks if this group is registered there."""
        ranks = world.pg_group_ranks
        if self in ranks:
            ranks[self] = {rank: rank for rank in range(self._size)}

    def shutdown(self) -> None:
        """Waits for operations in flight, then ends the threads and leaves the group."""
        if os.getpid() != self._process:  # a forked child: the parent owns everything here
            return
        self._let_go()
        self._settler.shutdown()
        self._connection.close()

    def _let_go(self) -> None:
        for work in self._collectives:
            work.settle_silently()
        self._collectives.clear()
        self._messages.clear()

    # Submission of all collectives to the engine.

    def _copy(
        self,
        kind: native.Kind,
        inputs: Buffers,
        outputs: Buffers,
        like: torch.Tensor,
        opts: Any,
        result: list[torch.Tensor],
        held: object,
        finish: Callable[[], None] | None,
        root: int = -1,
        even: bool = True,
        label: int = 0,
    ) -> Work:
        """Submits a collective that only moves bytes, so any dtype works."""
        dtype = DTYPES.get(like.dtype, native.DType.UINT8)
        uneven = not even or kind in (native.Kind.ALL_GATHER, native.Kind.GATHER)
        return self._submit(
            kind,
            inputs,
            outputs,
            0 if uneven else like.nbytes // (like.itemsize if like.dtype in DTYPES else 1),
            dtype,
            will_wait(opts),
            result,
            held,
            finish,
            like,
            root=root,
            label=label,
            timeout_s=seconds_of(opts),
        )

    def _submit(
        self,
        kind: native.Kind,
        inputs: Buffers,
        outputs: Buffers,
        count: int,
        dtype: native.DType,
        inline: bool,
        result: list[torch.Tensor],
        held: object,
        finish: Callable[[], None] | None,
        like: torch.Tensor | None = None,
        **options: Any,
    ) -> Work:
        """Submits a collective; `like` is one of the tensors whose memory the buffers describe."""
        arguments = (kind, inputs, outputs, count, dtype, inline, result, held, finish, like)
        if not profiler_events.enabled():
            return self._start(*arguments, **options)
        return profiler_events.recorded(kind, lambda: self._start(*arguments, **options))

    def _start(
        self,
        kind: native.Kind,
        inputs: Buffers,
        outputs: Buffers,
        count: int,
        dtype: native.DType,
        inline: bool,
        result: list[torch.Tensor],
        held: object,
        finish: Callable[[], None] | None,
        like: torch.Tensor | None,
        **options: Any,
    ) -> Work:
        call: dict[str, Any] = {
            "kind": kind,
            "inputs": inputs,
            "outputs": outputs,
            "count": count,
            "dtype": dtype,
        }
        if like is not None and (context := devices.context_of(like)) is not None:
            return self._submit_staged(context, {**call, **options}, result, held, finish)
        if self._between_hosts:
            self._link(kind, count, dtype, options)
        operation = self._engine.submit(**call, run_here=inline, **options)
        work = Work(self, [operation], result, held, finish)
        if not operation.done():
            self._collectives.add(work)
        return work

    def _submit_staged(
        self,
        context: devices.DeviceContext,
        call: dict[str, Any],
        result: list[torch.Tensor],
        held: object,
        finish: Callable[[], None] | None,
    ) -> Work:
        self._engine.rethrow()  # the caller does not wait: report earlier failures here
        kind, count, dtype = call["kind"], call["count"], call["dtype"]
        size = sum(bytes_ for _, bytes_ in call["inputs"] or call["outputs"])
        counts = devices.parts_of(kind, count, size)
        if self._between_hosts:
            for part in dict.fromkeys(counts):
                self._link(kind, part, dtype, call)
        try:
            if context.device not in self._stagers:
                self._stagers[context.device] = native.Stager(context.device)
            stager = self._stagers[context.device]
            operations, passage = devices.stage(self._engine, stager, context, counts, call)
        except FireflyerError as error:
            devices.keep_for_ever((result, held))  # the device's streams may still use them
            self._connection.watch.announce(
                f"rank {self._rank} could not stage a call on its device: {error}", self._rank
            )
            raise
        work = devices.DeviceWork(
            self, operations, result, held, finish, context, passage, self._timeout_s
        )
        self._collectives.add(work)
        return work

    def _link(
        self, kind: native.Kind, count: int, dtype: native.DType, options: dict[str, Any]
    ) -> None:
        """Opens the connections that calls of this shape use, at the first such call."""
        named = {key: options[key] for key in ("root", "wire", "priority") if key in options}
        shape = (kind, count, dtype, *named.values())
        if shape in self._linked:
            return
        peers = self._engine.peers(kind=kind, count=count, dtype=dtype, **named)
        self._connection.links.ensure(peers, Purpose.DATA)
        self._linked.add(shape)

    def _over(self, works: list[Work], result: list[torch.Tensor]) -> Work:
        """Combines several works into one."""
        return works[0] if len(works) == 1 else Joined(self, works, list(result))

    def _finish_with(
        self, work: Work, result: list[torch.Tensor], finish: Callable[[], None] | None
    ) -> Work:
        """Returns the same work with another result and an additional callback for its end."""
        if finish is None:
            work._result = result
            return work
        return Joined(self, [work], result, finish)

    def failed(self, error: BaseException) -> None:
        """Writes the flight record of a broken group, once.

        In a sub-group, the text of a `RankFailed` also gets the rank's number in the default group.
        """
        if isinstance(error, RankFailed):
            for rank, place in world.pg_group_ranks.get(self, {}).items():
                if place == error.rank != rank:
                    error.args = (f"{error} (rank {rank} of the default group)",)
        if not self._recorded:
            self._recorded = True
            flight_recorder.dump(self._engine, self._rank, self._size, error)

    def ended(self, work: Work) -> None:
        """Releases the memory of a work after a wait."""
        self._collectives.discard(work)
        self._messages.discard(work)

    def withdraw(self, number: int) -> None:
        """Requests cancellation of the operation with this number on all ranks."""
        self._connection.watch.withdraw(number)

    def settle_later(self, work: Work) -> None:
        """Completes the work's future from a thread of the group, once the work is over."""
        self._settler.add(work)

    def _message(
        self,
        operation: native.Operation,
        tensor: torch.Tensor,
        flat: torch.Tensor,
        finish: Callable[[], None] | None,
    ) -> Work:
        work = Message(self, self._connection.p2p, operation, [tensor], flat, finish)
        self._messages.add(work)
        return work


def _master() -> str:
    return os.environ.get("MASTER_ADDR", "127.0.0.1")

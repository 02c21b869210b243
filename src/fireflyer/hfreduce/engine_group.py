"""What every collective of the torch process group stands on: the engine, the handles, the end of a group."""

import collections
import datetime
import os
from collections.abc import Callable, Sequence
from typing import Any, Self

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed import ProcessGroup

from fireflyer._native import hfreduce as native
from fireflyer.errors import ConfigError, FireflyerError, RankFailed
from fireflyer.hfreduce import devices, flight, profiling, rendezvous
from fireflyer.hfreduce.handles import Member
from fireflyer.hfreduce.handshake import Purpose
from fireflyer.hfreduce.reform import GRACE_S, join, reform
from fireflyer.hfreduce.settling import Settling
from fireflyer.hfreduce.tensors import DTYPES, Buffers, seconds_of, will_wait
from fireflyer.hfreduce.uncompiled import uncompiled
from fireflyer.hfreduce.wire import Wire
from fireflyer.hfreduce.work import OVER, Joined, Message, Work
from fireflyer.log import get_logger


@uncompiled
class EngineGroup(ProcessGroup):
    """A torch process group without its collectives; see `ProcessGroupHFReduce`."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta
    ) -> None:
        seconds = timeout.total_seconds()
        prefixed = dist.PrefixStore("hfreduce", store)
        self._begin(rendezvous.connect(prefixed, rank, size, seconds, _master()), timeout)

    @classmethod
    def join(
        cls, addresses: Sequence[str], timeout: datetime.timedelta, *, secret: str | None = None
    ) -> Self:
        """Becomes a member of a running group when its members next call `reform`.

        Args:
            addresses: `join_address` of members; one that answers is enough.
            timeout: for this call, and for the operations of the group.
            secret: of the group; default FIREFLYER_SECRET.

        Raises:
            ConfigError: no secret, or an address that is none.
            DeadlineExceeded, PeerLost, ProtocolMismatch: see `fireflyer.hfreduce.reform.join`.
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
        """A group of this process only, which `configure` makes larger.

        Args:
            timeout: for the operations of the group, and for `configure`.
        """
        group = cls.__new__(cls)
        store = dist.HashStore()
        group._begin(rendezvous.connect(store, 0, 1, timeout.total_seconds()), timeout)
        return group

    def _begin(self, connection: rendezvous.Connection, timeout: datetime.timedelta) -> None:
        ProcessGroup.__init__(self, connection.rank, connection.world)  # type: ignore[call-arg]
        self._use(connection)
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        self._devices = [torch.device(kind) for kind in kinds]
        self._process = os.getpid()
        self._group_name = ""
        self._group_description = ""
        self._timeout_s = timeout.total_seconds()
        self._messages: list[Work] = []  # kept alive as `_under_way` is, but they end in any order
        self._under_way: collections.deque[Work] = collections.deque()
        self._settler = Settling()
        self._member: Member | None = None

    def _use(self, connection: rendezvous.Connection) -> None:
        """Makes a connected group of the engine this object's own."""
        self._connection = connection
        self._engine = connection.group
        self._rank, self._size = connection.rank, connection.world
        self._between_hosts = len(connection.topology.hosts) > 1
        self._linked: set[tuple[Any, ...]] = set()
        self._stagers: dict[native.Device, native.Stager] = {}
        self._recorded = False

    # What torch asks of a group and of its backend: this object is both.

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "hfreduce"

    def name(self) -> str:
        return "hfreduce"

    # torch keeps both in the backends of a group, of which this one has none beside itself.

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
    """The wire codec of sums that name none themselves; alike on all ranks."""

    joined = False
    """Whether this process came when the group ran already."""

    supports_splitting = False
    supports_coalescing = False
    bound_device_id = None

    @property
    def network_bytes_sent(self) -> int:
        """Bytes that this rank has sent to other hosts so far."""
        return self._engine.network_bytes_sent

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host, both in order of rank."""
        return self._connection.topology.hosts

    def flight_records(self) -> list[dict[str, Any]]:
        """The group's last operations on this rank, oldest first; see `flight`."""
        return self._engine.records()

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Limits the operations that start from now on."""
        self._timeout_s = timeout.total_seconds()
        self._engine.set_timeout(self._timeout_s)

    _set_default_timeout = set_timeout

    def set_rules(self, rules: Sequence[native.Rule]) -> None:
        """Chooses the algorithms between hosts; calls that no rule applies to follow the engine's own.

        Every rank makes this call with the same rules, when it has nothing under way.
        """
        self._engine.set_rules(list(rules))
        self._linked.clear()  # other algorithms send to others

    def abort(self) -> None:
        """Ends what runs here and on all peers with an error; the group is unusable afterwards."""
        self._recorded = True  # an end that was wanted needs no explanation
        self._engine.abort()
        self._connection.watch.announce("the group was aborted")
        self._connection.post.fail("the group was aborted")

    def errored(self) -> Exception | None:
        """Why the group is broken; None while it is not. The shape of torchft's process groups."""
        try:
            self._engine.rethrow()
        except FireflyerError as error:
            return error
        return None

    def get_error(self) -> ErrorType:
        """`errored` as torch's backends tell it."""
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
        """Forms this group anew, in place, of the ranks that somebody else has agreed on.

        The call that torchft's manager makes of a process group after each quorum, with its arguments. It
        needs the store at `store_addr`; `reform` agrees among the members themselves and needs none. What is
        under way ends with an error.

        Args:
            store_addr: "host:port/prefix" of a TCPStore; the prefix is for these ranks and this time only.
            rank, world_size: of this process in the new group.
            replica_id, quorum_id, group_rank, group_world_size, global_ranks: told to the log, not used.

        Raises:
            ConfigError: `store_addr` is no such address.
            DeadlineExceeded, RankFailed, ProtocolMismatch, NoSpace, CollectiveError: see
                `rendezvous.connect`.
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
            raise ConfigError(f"store_addr={store_addr!r}: not host:port/prefix")
        if any(not work.is_completed() for work in (*self._under_way, *self._messages)):
            self.abort()
        self._let_go()
        self._connection.close()
        limit = datetime.timedelta(seconds=seconds)
        store = dist.TCPStore(host, int(port), None, False, limit, wait_for_workers=False)
        prefixed = dist.PrefixStore(prefix, store)
        self._use(rendezvous.connect(prefixed, rank, world_size, seconds, host))
        self._engine.set_timeout(self._timeout_s)
        self._tell_torch()

    @property
    def supports_reconfigure(self) -> bool:
        """Torch's name: managers such as torchft's ask it."""
        return True

    def get_reconfigure_handle(self) -> str:
        """Returns this member's handle, for `reconfigure` of all members. Opens a store, once."""
        if self._member is None:
            self._member = Member(self.join_address.rpartition(":")[0])
        return msgspec.json.encode(self._member.handle).decode()

    def reconfigure(self, opts: Any) -> Work:
        """Forms this group anew, in place, as torch's groups do from 2.14 on: all members call it.

        Args:
            opts: `handles`, a list in the order of ranks; `uuid`, a number that is another one each time;
                `timeout`, by default the group's. torch's or torchft's ReconfigureOptions.

        Returns:
            A work that is over.

        Raises:
            ConfigError: `handles` is no list, or misses this member's.
            DeadlineExceeded, RankFailed, ProtocolMismatch, NoSpace, CollectiveError: see `configure`.
        """
        self.get_reconfigure_handle()
        assert self._member is not None
        place = self._member.place(opts.handles, opts.uuid)
        self._form_at(*place, seconds_of(opts) or self._timeout_s)
        return OVER

    @property
    def join_address(self) -> str:
        """What a newcomer passes to `hfreduce.join` to be let in at the next `reform`."""
        return self._connection.join_address

    @property
    def join_addresses(self) -> list[str]:
        """The same of all members, by rank. One names its process for as long as that lives."""
        return self._connection.join_addresses

    @property
    def epoch(self) -> int:
        """Of the view that the members agreed on: 0 at first, higher after each `reform`."""
        return self._connection.epoch

    @property
    def newcomers_wait(self) -> bool:
        """Whether processes wait at this member to be let in at the next `reform`."""
        return bool(self._connection.seat.door.waiting())

    def reform(
        self,
        timeout: datetime.timedelta,
        *,
        quorum: int | None = None,
        grace: datetime.timedelta | None = None,
    ) -> list[int]:
        """Forms this group anew, in place, of the members that are alive and the newcomers that wait.

        Collective among them; needs neither a store nor rank 0. Survivors keep their order, newcomers come
        after them: `rank()` and `size()` are new. What was under way has ended with an error.

        Args:
            timeout: for this call.
            quorum: how many of the old members must agree; default more than half of them, or half with
                rank 0. With less, two parts of a network that was cut may both go on.
            grace: how long a member that is not known to be dead may take to call `reform`, too.

        Returns:
            Of each rank the one that it had before; -1 of newcomers.

        Raises:
            DeadlineExceeded: no quorum came together.
            RankFailed: names this rank itself if the others formed the group without it.
            ConfigError: this rank was closed, or an earlier `reform` of it failed: that ends the group.
        """
        self._let_go()
        before = self._connection.cards
        grace_s = GRACE_S if grace is None else grace.total_seconds()
        seconds = timeout.total_seconds()
        self._use(reform(self._connection, seconds, quorum=quorum, grace_s=grace_s))
        self._engine.set_timeout(self._timeout_s)
        self._tell_torch()
        return [before.index(card) if card in before else -1 for card in self._connection.cards]

    def _tell_torch(self) -> None:
        """Enters the new ranks into torch's book of who is who, if this group stands there."""
        ranks = dist.distributed_c10d._world.pg_group_ranks
        if self in ranks:
            ranks[self] = {rank: rank for rank in range(self._size)}

    def shutdown(self) -> None:
        """Waits for what is under way, then lets go of the threads and says goodbye."""
        if os.getpid() != self._process:  # a forked child: all of it is the parent's
            return
        self._let_go()
        self._settler.shutdown()
        self._connection.close()

    def _let_go(self) -> None:
        while self._under_way:
            self._under_way.popleft().settle_silently()
        self._messages.clear()

    # How all of them reach the engine.

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
        """A collective that only moves bytes: any dtype."""
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
        """`like`: one of the tensors whose memory the buffers are."""
        arguments = (kind, inputs, outputs, count, dtype, inline, result, held, finish, like)
        if not profiling.enabled():
            return self._start(*arguments, **options)
        return profiling.recorded(kind, lambda: self._start(*arguments, **options))

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
        if like is not None and (seat := devices.seat_of(like)) is not None:
            return self._submit_staged(seat, {**call, **options}, result, held, finish)
        if self._between_hosts:
            self._link(kind, count, dtype, options)
        operation = self._engine.submit(**call, run_here=inline, **options)
        work = Work(self, [operation], result, held, finish)
        if not operation.done():
            self._keep_alive(work)
        return work

    def _submit_staged(
        self,
        seat: devices.Seat,
        call: dict[str, Any],
        result: list[torch.Tensor],
        held: object,
        finish: Callable[[], None] | None,
    ) -> Work:
        self._engine.rethrow()  # the caller does not wait: here he hears of earlier failures
        kind, count, dtype = call["kind"], call["count"], call["dtype"]
        size = sum(bytes_ for _, bytes_ in call["inputs"] or call["outputs"])
        counts = devices.parts_of(kind, count, size)
        if self._between_hosts:
            for part in dict.fromkeys(counts):
                self._link(kind, part, dtype, call)
        try:
            if seat.device not in self._stagers:
                self._stagers[seat.device] = native.Stager(seat.device)
            stager = self._stagers[seat.device]
            operations, passage = devices.stage(self._engine, stager, seat, counts, call)
        except FireflyerError as error:
            devices.keep_for_ever((result, held))  # some of it may be in the device's streams
            self._connection.watch.announce(
                f"rank {self._rank} could not stage a call on its device: {error}", self._rank
            )
            raise
        work = devices.DeviceWork(
            self, operations, result, held, finish, seat, passage, self._timeout_s
        )
        self._keep_alive(work)
        return work

    def _link(
        self, kind: native.Kind, count: int, dtype: native.DType, options: dict[str, Any]
    ) -> None:
        """Makes the connections that such a call sends over, at the first one of its shape."""
        named = {key: options[key] for key in ("root", "wire", "priority") if key in options}
        shape = (kind, count, dtype, *named.values())
        if shape in self._linked:
            return
        peers = self._engine.peers(kind=kind, count=count, dtype=dtype, **named)
        self._connection.links.ensure(peers, Purpose.DATA)
        self._linked.add(shape)

    def _over(self, works: list[Work], result: list[torch.Tensor]) -> Work:
        """One work for several."""
        return works[0] if len(works) == 1 else Joined(self, works, list(result))

    def _finish_with(
        self, work: Work, result: list[torch.Tensor], finish: Callable[[], None] | None
    ) -> Work:
        """The same work with another result, and one more thing to do at its end."""
        if finish is None:
            work._result = result
            return work
        return Joined(self, [work], result, finish)

    def _keep_alive(self, work: Work) -> None:
        """The engine has bare addresses: whoever drops his Work and tensors must not free them under it.
        Operations end in order, so what is over stands in front."""
        while self._under_way and self._under_way[0].is_completed():
            self._under_way.popleft()
        self._under_way.append(work)

    def failed(self, error: BaseException) -> None:
        """Writes the flight record of a broken group, once. In a sub-group, the error of a rank that failed
        gets its number in the default group."""
        if isinstance(error, RankFailed):
            for rank, place in dist.distributed_c10d._world.pg_group_ranks.get(self, {}).items():
                if place == error.rank != rank:
                    error.args = (f"{error} (rank {rank} of the default group)",)
        if not self._recorded:
            self._recorded = True
            flight.dump(self._engine, self._rank, self._size, error)

    def withdraw(self, number: int) -> None:
        """Asks that the operation of this number be cancelled on all ranks."""
        self._connection.watch.withdraw(number)

    def settle_later(self, work: Work) -> None:
        """Completes the work's future from a thread of the group, once it is over."""
        self._settler.add(work)

    def _message(
        self,
        operation: native.Operation,
        tensor: torch.Tensor,
        flat: torch.Tensor,
        finish: Callable[[], None] | None,
    ) -> Work:
        work = Message(self, self._connection.post, operation, [tensor], flat, finish)
        self._messages = [m for m in self._messages if not m.is_completed()]
        self._messages.append(work)
        return work


def _master() -> str:
    return os.environ.get("MASTER_ADDR", "127.0.0.1")

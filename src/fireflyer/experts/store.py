"""Store of experts: the tiers of one process, and a loader thread."""

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import torch

from fireflyer.errors import (
    Corrupted,
    DamagedExpert,
    DeadlineExceeded,
    ExpertError,
    ExpertInUse,
    ExpertTooLarge,
    FireflyerError,
    NoSpace,
    NoSuchExpert,
)
from fireflyer.experts import events, folder, manifest
from fireflyer.experts.events import Action, Event, Place, Reason
from fireflyer.experts.manifest import Manifest
from fireflyer.experts.parts import Job, Stats, Ticket, default_folder, size_of
from fireflyer.experts.tensors import Expert, views
from fireflyer.experts.tiers import IN_PROGRESS, IN_WARM, Counts, Tiers
from fireflyer.experts.warm import LoadBuffer, Mapped, WarmFolder
from fireflyer.storage import open_storage

POLL_S = 0.05
"""Seconds between a waiting caller's checks for changes by other processes."""


class Store:
    """Experts of a folder, served from tiers. Thread-safe; unusable in a forked child."""

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        warm_bytes: int | str,
        hot_bytes: int | str | None = None,
        device: str | torch.device = "cpu",
        warm_folder: str | os.PathLike[str] | None = None,
        ahead: int = 8,
    ) -> None:
        """Opens a folder by its path or URL (fs3:///experts), and creates a missing folder.

        Args:
            warm_bytes: budget of warm memory, e.g. "8G", in total for all stores that share it.
            hot_bytes: budget of the hot tier; default: warm_bytes.
            device: device of the tensors. For "cpu" they are views on warm memory, so the hot tier
                needs no additional memory. For another device they are copies.
            warm_folder: folder in a tmpfs. Stores with the same folder share warm memory; default:
                a folder in /dev/shm for each user and place.
            ahead: maximum number of experts of a hint to load ahead.

        Raises:
            ConfigError: an argument is invalid.
            DamagedExpert: a manifest is damaged.
            StorageError: the folder or warm memory cannot be used.
        """
        warm, hot = size_of(warm_bytes), size_of(warm_bytes if hot_bytes is None else hot_bytes)
        self._storage = open_storage(place)
        self._device = torch.device(device)
        self._tiers = Tiers(warm, hot, ahead)
        self._known: dict[str, tuple[Manifest, str]] = {}
        self._hot: dict[str, Expert] = {}
        self._mapped: dict[str, Mapped] = {}
        """Mappings of hot experts on the CPU."""
        self._errors: dict[str, Exception] = {}
        self._tickets: dict[str, list[Ticket]] = {}
        self._jobs: deque[Job] = deque()
        self._broken: Exception | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._pid = os.getpid()
        self._read_bytes, self._read_s = 0, 0.0
        self._add_known(self._manifests())
        where = Path(warm_folder) if warm_folder is not None else default_folder(place)
        self._warm = WarmFolder(where)
        self._leave = weakref.finalize(self, self._warm.close)
        self._loader = threading.Thread(target=_work, args=(weakref.ref(self),), daemon=True)
        self._loader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the loader and detaches from warm memory. Tensors that callers hold stay valid."""
        if os.getpid() != self._pid or not self._leave.alive:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._loader.join()
        with self._changed:
            for name, tickets in self._tickets.items():
                for ticket in tickets:
                    ticket.error = ExpertError("the store was closed", name)
            self._tickets.clear()
            self._hot.clear()
            for mapped in self._mapped.values():
                mapped.close()
            self._mapped.clear()
            with self._warm.locked():
                for job in self._jobs:
                    if job.buffer is not None:
                        self._warm.forget(job.buffer)
            self._jobs.clear()
            self._changed.notify_all()
        self._leave()

    # Requests ------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Returns the names of the known experts."""
        with self._locked():
            return sorted(self._known)

    def states(self) -> dict[str, Place]:
        """Returns the state of each expert in this process."""
        with self._locked():
            return {name: entry.place for name, entry in sorted(self._tiers.entries.items())}

    @contextlib.contextmanager
    def get(self, name: str, *, timeout_s: float = 600.0) -> Iterator[Expert]:
        """Yields an expert, which stays in the hot tier until the end of the block.

        The end of the block empties the expert's dict of tensors. Tensors that outlive the block
        stay valid, and keep their bytes in warm memory.

        Raises:
            NoSuchExpert, ExpertTooLarge, DamagedExpert: the expert cannot be served. A damaged
            expert must be added again.
            NoSpace: experts in use left no room until the timeout, or the tmpfs is full.
            DeadlineExceeded: the expert was not loaded before the timeout. A read that this caller
                runs itself is not interrupted.
            StorageError: the expert cannot be read.
        """
        if name not in self._known:  # another process may have added it
            found = manifest.read(self._storage, name)
            with self._open():
                self._add_known({name: found})
        handed = Expert(name, self._served(name, time.monotonic() + timeout_s).tensors)
        try:
            yield handed
        finally:
            handed.tensors.clear()  # so the caller's variable keeps no tensor
            if os.getpid() == self._pid:
                with self._changed:
                    if not self._closed:
                        self._handle(events.Released(name))

    def hint(self, names: Iterable[str]) -> None:
        """Announces the experts that are expected next, in this order; replaces the previous hint.

        The store loads these experts ahead, one at a time, and evicts them last. When an expert is
        served, its first occurrence is removed from the hint. Unknown names are ignored.
        """
        with self._open():
            self._handle(events.Hinted(tuple(names)))

    def wait_idle(self, timeout_s: float = 600.0) -> None:
        """Waits until no expert is being loaded.

        Raises:
            DeadlineExceeded: an expert is still being loaded.
        """
        with self._open():
            done = self._changed.wait_for(self._rests, timeout_s)
            if self._broken is not None:
                raise self._end_of_loader("")
            if not done:
                raise DeadlineExceeded(f"experts are still being loaded after {timeout_s} s")

    def add(self, name: str, source: Any) -> None:
        """Adds an expert to the folder; see `fireflyer.experts.folder.add`."""
        with self._open():
            pass
        found = folder.add(self._storage, name, source)
        with self._open():
            self._add_known({name: found})

    def remove(self, name: str) -> None:
        """Removes an expert from memory and from the folder.

        Raises:
            NoSuchExpert: there is no such expert.
            ExpertInUse: a caller, a tensor or another process of this node uses the expert, or
                it is being loaded; nothing has changed.
            StorageError: the expert cannot be removed.
        """
        with self._open():
            for action in self._handle(events.Dropped(name)):
                if isinstance(action, events.Refuse) and action.name == name:
                    if action.reason is Reason.UNKNOWN:
                        raise NoSuchExpert(f"{self._storage} has no expert {name}", name)
                    raise ExpertInUse(f"expert {name} is in use: remove it later", name)
        folder.remove(self._storage, name)

    def refresh(self) -> None:
        """Finds experts that other processes added to the folder."""
        found = self._manifests()
        with self._open():
            self._add_known(found)

    def stats(self) -> Stats:
        with self._locked():
            counts: Counts = self._tiers.counts
            warm = self._tiers.foreign_bytes + self._sum(IN_WARM)
            hot = self._sum(frozenset((Place.HOT, Place.HEATING)))
            return Stats(
                **vars(counts), read_bytes=self._read_bytes, read_s=self._read_s, warm_bytes=warm,
                hot_bytes=hot,
            )  # fmt: skip

    # REQUIRES: the lock of the condition ---------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if os.getpid() != self._pid:  # a fork may copy a held lock
            raise ExpertError("a store belongs to the process that made it: open another one")
        with self._changed:
            yield

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        with self._locked():
            if self._closed:
                raise ExpertError("the store is closed")
            if self._broken is not None:
                raise self._end_of_loader("")
            yield

    def _served(self, name: str, deadline: float) -> Expert:
        ticket = Ticket()
        try:
            with self._open():
                self._tickets.setdefault(name, []).append(ticket)
                self._handle(events.Wanted(name, time.time_ns()))
                own = self._take_job(name)
            if own is not None:  # run in this thread, which saves two thread switches
                self._run_here(own)
            with self._open():
                self._wait(ticket, deadline)
                if ticket.error is not None:
                    raise ticket.error
                if ticket.expert is None:
                    raise self._timeout(name)
                return ticket.expert
        except BaseException:
            if os.getpid() == self._pid:
                with self._changed:
                    self._withdraw(name, ticket)
            raise

    def _wait(self, ticket: Ticket, deadline: float) -> None:
        while not ticket.done and (left := deadline - time.monotonic()) > 0:
            self._changed.wait(min(left, POLL_S))
            waits = not ticket.done and not self._closed and self._broken is None
            if waits and self._idle():
                self._check_folder()

    def _withdraw(self, name: str, ticket: Ticket) -> None:
        """Ends the wait of a caller; releases the expert if it arrived too late."""
        if self._closed or self._broken is not None:
            return
        if ticket in self._tickets.get(name, ()):
            self._tickets[name].remove(ticket)
            self._handle(events.Withdrawn(name))
        elif ticket.expert is not None:
            self._handle(events.Released(name))

    def _take_job(self, name: str) -> Job | None:
        """Takes the job that reads an expert, if no thread has begun it."""
        reads = (job for job in self._jobs if job.name == name and job.buffer is not None)
        found = next(reads, None)
        if found is not None:
            self._jobs.remove(found)
        return found

    def _run_here(self, job: Job) -> None:
        """Runs a job in the thread of a caller, which may be interrupted."""
        try:
            event = job.run()
        except BaseException:
            with self._changed:
                if job.buffer is not None:
                    self._warm.forget(job.buffer)
            self._errors[job.name] = ExpertError(f"loading {job.name} was interrupted", job.name)
            self._finish(events.Failed(job.name, False))
            raise
        self._finish(event)

    def _timeout(self, name: str) -> FireflyerError:
        entry = self._tiers.entries[name]
        held = [other for other in self._tiers.blocking() if other != name]
        if entry.place not in IN_PROGRESS and held:
            return NoSpace(
                f"no room for expert {name}: {', '.join(held[:5])} in use; "
                "release one or enlarge warm_bytes and hot_bytes"
            )
        if entry.place not in IN_PROGRESS:
            return NoSpace(
                f"no room for expert {name}: other stores, or tensors that outlived their block, "
                f"use warm memory {self._warm.path}"
            )
        return DeadlineExceeded(f"expert {name} was not loaded in time; it is {entry.place.value}")

    def _rests(self) -> bool:
        return self._idle() or self._closed or self._broken is not None

    def _has_work(self) -> bool:
        return bool(self._jobs or self._closed or self._warm.garbage)

    def _idle(self) -> bool:
        return not any(entry.place in IN_PROGRESS for entry in self._tiers.entries.values())

    def _sum(self, places: frozenset[Place]) -> int:
        return sum(entry.bytes for entry in self._tiers.entries.values() if entry.place in places)

    def _manifests(self) -> dict[str, Manifest]:
        return {name: manifest.read(self._storage, name) for name in manifest.names(self._storage)}

    def _add_known(self, found: dict[str, Manifest]) -> None:
        for name, each in found.items():
            self._tiers.step(events.Known(name, each.size))
            if self._tiers.entries[name].place is Place.COLD:
                self._known[name] = (each, each.digest(name))

    def _check_folder(self) -> None:
        with self._warm.locked():
            self._run([self._seen()])

    def _handle(self, event: Event) -> list[Action]:
        """Passes an event to the tiers; returns the executed actions."""
        entry = self._tiers.entries.get(getattr(event, "name", ""))
        quick = isinstance(event, events.Released) or (
            isinstance(event, events.Wanted) and entry is not None and entry.place is Place.HOT
        )
        with self._warm.locked():
            return self._run([event] if quick else [self._seen(), event])

    def _run(self, given: list[Event]) -> list[Action]:
        queue, done = deque(given), []
        while queue:
            for action in self._tiers.step(queue.popleft()):
                done.append(action)
                queue.extend(self._act(action))
        self._warm.drop_spare()  # pages of an eviction that no load used
        self._changed.notify_all()
        return done

    def _seen(self) -> events.Seen:
        found = self._warm.found()
        images, foreign = {}, 0
        digests = {digest: name for name, (_, digest) in self._known.items()}
        for digest, (size, used) in found.images.items():
            name = digests.get(digest)
            if name is not None and self._tiers.entries[name].place is not Place.DAMAGED:
                images[name] = used
            else:
                foreign += size
        for file, size in found.loading.items():
            owner = self._tiers.entries.get(digests.get(file.partition(".")[0], ""))
            foreign += size if owner is None or owner.place is not Place.LOADING else 0
        return events.Seen(images, foreign)

    def _act(self, action: Action) -> list[Event]:
        name = action.name
        if isinstance(action, events.Refuse | events.Delete):
            if isinstance(action, events.Delete):
                self._known.pop(name)
            for ticket in self._tickets.pop(name, []):
                ticket.error = self._refusal(action)
            return []
        digest = self._known[name][1]
        if isinstance(action, events.Serve):
            self._warm.touch(digest, self._tiers.entries[name].used)
            for ticket in self._tickets.pop(name):
                ticket.expert = self._hot[name]
        elif isinstance(action, events.Cool):
            del self._hot[name]
            if (mapped := self._mapped.pop(name, None)) is not None:
                self._warm.detach(digest, mapped)
        elif isinstance(action, events.Evict):
            gone = self._warm.evict(digest)
            return [events.Evicted(name) if gone else events.EvictionFailed(name)]
        elif isinstance(action, events.Load):
            return self._start_load(name, action.bytes, digest)
        else:
            return self._start_heat(name, digest)
        return []

    def _refusal(self, action: events.Refuse | events.Delete) -> Exception:
        name = action.name
        reason = action.reason if isinstance(action, events.Refuse) else Reason.UNKNOWN
        if reason in (Reason.DAMAGED, Reason.FAILED):
            return self._errors[name]
        if reason is Reason.TOO_LARGE:
            size = self._tiers.entries[name].bytes
            return ExpertTooLarge(
                f"expert {name} has {size} bytes, the tiers {self._tiers.warm_bytes} (warm) and "
                f"{self._tiers.hot_bytes} (hot): enlarge warm_bytes and hot_bytes",
                name,
            )
        return NoSuchExpert(f"{self._storage} has no expert {name}", name)

    def _start_load(self, name: str, size: int, digest: str) -> list[Event]:
        if self._warm.has(digest):  # another process loaded it meanwhile
            return [events.Loaded(name)]
        if self._warm.is_loading(digest):
            self._jobs.append(Job(name, lambda: self._await_other(name, digest)))
            return []
        try:
            buffer = self._warm.buffer(digest, size)
        except FireflyerError as error:
            self._errors[name] = error
            return [events.Failed(name, False)]
        known = self._known[name][0]
        self._jobs.append(Job(name, lambda: self._load(name, known, digest, buffer), buffer))
        return []

    def _start_heat(self, name: str, digest: str) -> list[Event]:
        mapped = self._warm.attach(digest)
        if mapped is None:
            return [events.Lost(name)]
        if self._device.type == "cpu":
            return [self._heat(name, digest, mapped)]
        self._jobs.append(Job(name, lambda: self._copy(name, digest, mapped)))
        return []

    # Jobs of the loader --------------------------------------------------------------------------

    def _copy(self, name: str, digest: str, mapped: Mapped) -> Event:
        """Copies an expert to the device, and then detaches its image in warm memory."""
        event = self._heat(name, digest, mapped)
        with self._changed:
            if (held := self._mapped.pop(name, None)) is not None:
                self._warm.detach(digest, held)
        return event

    def _heat(self, name: str, digest: str, mapped: Mapped) -> Event:
        where = f"{self._storage}/{self._known[name][0].file}"
        try:
            self._hot[name] = Expert(name, views(mapped.mapping, where, self._device))
            self._mapped[name] = mapped
        except Corrupted as error:
            self._errors[name] = DamagedExpert(f"expert {name} is damaged: {error}", name)
            mapped.close()
            return events.Failed(name, True)
        except Exception as error:  # noqa: BLE001  # device drivers raise their own classes
            self._errors[name] = error
            mapped.close()
            return events.Failed(name, False)
        return events.Heated(name)

    def _load(self, name: str, known: Manifest, digest: str, buffer: LoadBuffer) -> Event:
        begin = time.monotonic()
        try:
            memory = buffer.memory()
            try:
                folder.read_into(self._storage, name, known, memory)
            finally:
                memory.release()
        except Exception as error:  # noqa: BLE001  # a caller waits for the result
            return self._not_loaded(name, known, buffer, error)
        with self._changed:
            if self._closed:  # the store was closed during a caller's read
                self._warm.forget(buffer)
                return events.Failed(name, False)
            self._read_bytes += known.size
            self._read_s += time.monotonic() - begin
            with self._warm.locked():
                self._warm.publish(buffer, digest)
                self._warm.touch(digest, time.time_ns())
        return events.Loaded(name)

    def _not_loaded(
        self, name: str, known: Manifest, buffer: LoadBuffer, error: Exception
    ) -> Event:
        with self._changed:
            self._warm.forget(buffer)
        if isinstance(error, DamagedExpert | NoSuchExpert):
            try:
                now = manifest.read(self._storage, name)
            except FireflyerError as other:
                error = other
            else:
                if now != known:  # the expert was replaced meanwhile
                    with self._changed:
                        self._known[name] = (now, now.digest(name))
                    return events.FileChanged(name, now.size)
        self._errors[name] = error
        return events.Failed(name, isinstance(error, DamagedExpert))

    def _await_other(self, name: str, digest: str) -> Event:
        """Waits while another process reads the same expert."""
        with self._changed:
            while not self._closed:
                with self._warm.locked():
                    if not self._warm.is_loading(digest):
                        break
                self._changed.wait(POLL_S / 5)
        # FileChanged requests the expert once more; `_start_load` first checks whether it was published
        # meanwhile.
        return events.FileChanged(name, self._known[name][0].size)

    def _next_job(self) -> Job | None:
        """Waits for a job; jobs for which a caller waits come first.

        Returns None if the store is closed, or if no job has come within 5 s.
        """
        with self._changed:
            garbage, self._warm.garbage = self._warm.garbage, []
        garbage.clear()  # outside the lock, so callers can run meanwhile
        with self._changed:
            self._changed.wait_for(self._has_work, POLL_S * 100)
            if not self._jobs or self._closed:
                return None
            waited = (job for job in self._jobs if self._tiers.entries[job.name].waiting)
            chosen = next(waited, self._jobs[0])
            self._jobs.remove(chosen)
            return chosen

    def _finish(self, event: Event) -> None:
        with self._changed:
            if not self._closed:
                self._handle(event)

    def _fail_all(self, error: Exception) -> None:
        """Fails all callers after an unexpected error in the loader."""
        with self._changed:
            self._broken = error
            for name, tickets in self._tickets.items():
                for ticket in tickets:
                    ticket.error = self._end_of_loader(name)
            self._tickets.clear()
            self._changed.notify_all()

    def _end_of_loader(self, name: str) -> ExpertError:
        why = f"the store's loader ended: {self._broken!r}; open another store"
        failed = ExpertError(why, name)
        failed.__cause__ = self._broken
        return failed


def _work(reference: "weakref.ref[Store]") -> None:
    """Runs the jobs of a store until it is closed or garbage-collected."""
    while (store := reference()) is not None and not store._closed and store._broken is None:
        if (job := store._next_job()) is not None:
            try:
                store._finish(job.run())
            except Exception as error:  # noqa: BLE001  # callers wait for this thread
                store._fail_all(error)
        del store, job

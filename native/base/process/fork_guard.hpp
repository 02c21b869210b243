// Descriptors that a forked child must not keep: a child's copy of a socket would hide the parent's death from the
// peer.
//
// Thread-safe. The first call registers the handler that runs in the child. The handler replaces each guarded
// descriptor by a descriptor of /dev/null with the same number. So the number stays taken, and code in the child that
// closes this number closes no unrelated descriptor. The parent's connection stays open.
#pragma once

#include <new>

namespace ff::fork_guard {

// Guards `fd` from now on. Throws Code::no_space for a number beyond 2^20.
void add(int fd);
// Ends the guard. REQUIRED before the descriptor is closed or given away, because its number may be reused afterwards.
void remove(int fd);
// remove() and ::close().
void close(int fd);

// Returns a number that grows by one in every forked child. If the number has changed since an object's construction,
// the object is a child's copy, and the object's threads do not exist. Throws Code::storage, as add() does, if
// /dev/null cannot be opened.
unsigned generation();

// Constructs a member anew, without destroying the old one, in a child's copy of an object. The old member's destructor
// would wait for threads of the parent, or end something that the parent still uses.
template <class T>
void forget(T& member) {
  new (&member) T();
}

}  // namespace ff::fork_guard

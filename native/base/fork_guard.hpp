// Descriptors that must not live on in a forked child: a child that held a copy of a socket would hide the death
// of its parent from the other side.
//
// Thread-safe. The handler that runs in the child is registered with the first call; it replaces each guarded
// descriptor by one of /dev/null, so that its number stays taken and whoever believes to own it in the child
// closes nothing else. Nothing is done to the connection itself: the parent does not notice.
#pragma once

#include <new>

namespace ff::fork_guard {

// Guards `fd` from now on. Throws Code::no_space for a number beyond 2^20.
void add(int fd);
// Ends the guard. REQUIRED before the descriptor is closed or given away; its number may be anybody's afterwards.
void remove(int fd);
// remove() and ::close().
void close(int fd);

// Grows by one in every forked child: an object that finds another number than at its construction is the copy in
// a child, whose threads do not exist. Throws Code::storage if /dev/null cannot be opened, as add() does.
unsigned generation();

// In such a copy: makes a member new without destroying what it was, where that would wait for threads of the
// parent, or end what the parent still uses.
template <class T>
void forget(T& member) {
  new (&member) T();
}

}  // namespace ff::fork_guard

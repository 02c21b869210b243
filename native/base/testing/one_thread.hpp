// Included by tests that start no thread. CMakeLists.txt leaves such a test out of the thread sanitizer's build, which
// would find nothing there. The test aborts if it starts a thread.
#pragma once

#include <pthread.h>

#include "base/testing/check.hpp"

#ifndef FF_LIBFUZZER  // libFuzzer starts a thread of its own
// Replaces libc's function, also for the libraries of the program.
extern "C" int pthread_create(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*) noexcept {
  CHECK(!"starts no thread");
}
#endif

// Included by a test that starts no thread: CMakeLists.txt leaves its program out of the build for the thread sanitizer,
// which would see nothing. The program aborts if it does start one.
#pragma once

#include <pthread.h>

#include "base/check.hpp"

#ifndef FF_LIBFUZZER  // has a thread of its own
// In the place of libc's, for the libraries of the program, too.
extern "C" int pthread_create(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*) noexcept {
  CHECK(!"starts no thread");
}
#endif

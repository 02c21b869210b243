// CHECK for the C++ tests prints the failed condition with its file and line, and aborts. FF_THREAD_SANITIZER is true
// in a build with the thread sanitizer.
#pragma once

#include <cstdio>
#include <cstdlib>

#ifdef __SANITIZE_THREAD__
#define FF_THREAD_SANITIZER true
#else
#define FF_THREAD_SANITIZER false
#endif

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "%s:%d: CHECK(%s)\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                               \
    }                                                                             \
  } while (false)

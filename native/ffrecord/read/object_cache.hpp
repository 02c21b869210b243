// A lock-free cache of at most two objects for reuse.
//
// Threads: any number at once. It has no lock, which a forked child could inherit locked.
#pragma once

#include <array>
#include <atomic>
#include <memory>

namespace ff::ffrecord {

template <class T>
class ObjectCache {
 public:
  ObjectCache() = default;
  ObjectCache(const ObjectCache&) = delete;
  ObjectCache& operator=(const ObjectCache&) = delete;
  ~ObjectCache() { clear(); }
  void clear() {
    while (take()) {
    }
  }
  // Returns one of the kept objects; null if there is none.
  std::unique_ptr<T> take() {
    for (auto& place : places_) {
      if (T* const found = place.exchange(nullptr, std::memory_order_acq_rel)) return std::unique_ptr<T>(found);
    }
    return nullptr;
  }
  // Keeps the object; destroys it if two objects are kept already.
  void give(std::unique_ptr<T> thing) {
    for (auto& place : places_) {
      T* empty = nullptr;
      if (place.compare_exchange_strong(empty, thing.get(), std::memory_order_acq_rel)) {
        static_cast<void>(thing.release());
        return;
      }
    }
  }

 private:
  std::array<std::atomic<T*>, 2> places_{};
};

}  // namespace ff::ffrecord

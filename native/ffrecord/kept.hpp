// Two places where things wait to be used again.
//
// Threads: any number at once, without a lock, so also in a forked child, where a lock could be held for ever.
#pragma once

#include <array>
#include <atomic>
#include <memory>

namespace ff::ffrecord {

template <class T>
class Kept {
 public:
  Kept() = default;
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  ~Kept() { clear(); }
  void clear() {
    while (take()) {
    }
  }
  // One of them; none if none waits.
  std::unique_ptr<T> take() {
    for (auto& place : places_) {
      if (T* const found = place.exchange(nullptr, std::memory_order_acq_rel)) return std::unique_ptr<T>(found);
    }
    return nullptr;
  }
  // Destroys it where both places are taken.
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

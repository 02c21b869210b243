// A range of memory that other processes can map: an anonymous memfd, wholly reserved, mapped read-write.
// Owns its descriptor and its mapping. Immutable after construction; the bytes are the caller's to order.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

namespace ff {

class Segment {
 public:
  // Creates and reserves `bytes` (zeroed). `place` is given the mapped range before any of its pages exists, to say
  // where they shall be; it must not touch them. Throws Code::no_space if the memory is refused, and what `place` does.
  using Place = std::function<void(char*)>;
  static Segment create(const std::string& name, std::size_t bytes, const Place& place = nullptr);
  // Maps a segment received from a peer; takes ownership of `fd`.
  static Segment attach(int fd);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  char* data() const { return data_; }
  std::size_t size() const { return size_; }
  int fd() const { return fd_; }

 private:
  Segment(int fd, std::size_t size);  // maps

  int fd_ = -1;
  char* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace ff

// A range of memory that other processes can map: an anonymous memfd, fully reserved, mapped read-write. Owns its
// descriptor and its mapping. Immutable after construction; the caller synchronizes access to the bytes.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

namespace ff {

class Segment {
 public:
  // Creates and reserves `bytes` (zeroed). `place` receives the mapped range before any of its pages exists and sets
  // their placement; it must not touch them. Throws Code::no_space if the memory is refused, and what `place` throws.
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
  Segment(int fd, std::size_t size);  // maps `fd`, and closes it on an error

  int fd_ = -1;
  char* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace ff

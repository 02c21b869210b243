#include "fs3/mount/core.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "base/error.hpp"

namespace ff::fs3::mount {

namespace {

// Counts a write in FileState::writers while the write is in flight.
class Writer {
 public:
  explicit Writer(FileState& file) : file_(file) { ++file_.writers; }
  ~Writer() { --file_.writers; }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

 private:
  FileState& file_;
};

client::Pieces piece_of(const FileState& file, std::int64_t offset, std::byte* memory, std::size_t bytes) {
  const client::FileMap* const map = &file.map;
  const client::Range range{0, offset, static_cast<std::int64_t>(bytes), memory};
  return {client::split({&map, 1}, {&range, 1})};
}

}  // namespace

Core::Core(io::Engine& engine, Call call, Finish finish, Limits limits)
    : engine_(engine), call_(std::move(call)), finish_(std::move(finish)), limits_(limits) {}

Answer Core::call(const Request& request) noexcept {
  try {
    return call_(request);
  } catch (const std::exception&) {  // an answer of another form is a bug, which must not end the mount
    return {.error = EIO};
  }
}

std::int64_t Core::read(FileState& file, std::int64_t offset, std::span<std::byte> memory,
                        std::int32_t caller_pid) noexcept {
  try {
    const auto wanted = std::clamp<std::int64_t>(file.end - offset, 0, static_cast<std::int64_t>(memory.size()));
    if (wanted == 0) return 0;
    client::Pieces batch = piece_of(file, offset, memory.data(), static_cast<std::size_t>(wanted));
    const std::size_t failed = engine_.read(batch.pieces, deadline(memory.size()));
    if (failed != 0 || !batch.holes().empty()) {
      if (const int error = finish_(file, batch, false, caller_pid); error != 0) return -error;
      return std::clamp<std::int64_t>(file.end - offset, 0, wanted);  // another client may have truncated the file
    }
    return wanted;
  } catch (const std::exception&) {
    return -EIO;
  }
}

std::int64_t Core::write(FileState& file, std::int64_t offset, std::span<const std::byte> bytes,
                         std::int32_t caller_pid) noexcept {
  try {
    if (bytes.empty()) return 0;
    const std::int64_t end = offset + static_cast<std::int64_t>(bytes.size());
    const Writer counted(file);
    if (end > file.widened) {
      Request widen{.op = "widen", .inode = file.inode, .offset = offset, .size = end - offset};
      widen.caller_pid = caller_pid;
      const Answer widened = call(widen);
      if (widened.error != 0) return -widened.error;
    }
    auto* const memory = const_cast<std::byte*>(bytes.data());  // writes do not change it
    client::Pieces batch = piece_of(file, offset, memory, bytes.size());
    if (engine_.write(batch.pieces, deadline(bytes.size())) != 0) {
      const int error = finish_(file, batch, true, caller_pid);
      if (error != 0) return -error;
    }
    file.wrote(end);
    return static_cast<std::int64_t>(bytes.size());
  } catch (const std::exception&) {
    return -EIO;
  }
}

io::Engine::Clock::time_point Core::deadline(std::size_t bytes) const {
  const std::chrono::duration<double> limit(limits_.attempt_s + static_cast<double>(bytes) / limits_.slowest);
  return io::Engine::Clock::now() + std::chrono::duration_cast<io::Engine::Clock::duration>(limit);
}

std::unique_ptr<Session> open_session(const std::string& library, const std::string& directory, Handler& handler,
                                      const Options& options) {
  void* const loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr) throw Error(Code::storage, std::string("cannot load libfuse: ") + dlerror());
  using Open = Session* (*)(const char*, Handler*, const Options*);
  const auto open = reinterpret_cast<Open>(dlsym(loaded, "ff_open_fuse_session"));
  if (open == nullptr) throw Error(Code::storage, library + " is not the mount's library");
  std::unique_ptr<Session> session(open(directory.c_str(), &handler, &options));
  if (session == nullptr) throw Error(Code::storage, "libfuse could not mount " + directory);
  return session;
}

}  // namespace ff::fs3::mount

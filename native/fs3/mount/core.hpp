// Answers the requests of a mount: bytes through the client's engine, everything else through a callback.
//
// Thread contract: any thread. The callbacks run in the caller's thread, without a lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "fs3/client/batch.hpp"
#include "fs3/io/client/engine.hpp"
#include "fs3/mount/requests.hpp"

namespace ff::fs3::mount {

class Core final : public Handler {
 public:
  using Call = std::function<Answer(const Request&)>;
  // Finishes pieces that failed, or that touched a hole, and returns 0 or an errno. Retries keep the tags of writes, so
  // that a write still in flight cannot take effect after a later write.
  using Finish = std::function<int(FileState&, client::Pieces&, bool write, std::int32_t caller_pid)>;

  struct Limits {
    double attempt_s;  // timeout of one attempt in seconds, without the time for its bytes
    double slowest;    // bytes a second: the timeout grows by the time for the attempt's bytes at this rate
  };

  Core(io::Engine& engine, Call call, Finish finish, Limits limits);

  Answer call(const Request& request) noexcept override;
  std::int64_t read(FileState& file, std::int64_t offset, std::span<std::byte> memory,
                    std::int32_t caller_pid) noexcept override;
  std::int64_t write(FileState& file, std::int64_t offset, std::span<const std::byte> bytes,
                     std::int32_t caller_pid) noexcept override;

 private:
  io::Engine::Clock::time_point deadline(std::size_t bytes) const;

  io::Engine& engine_;
  const Call call_;
  const Finish finish_;
  const Limits limits_;
};

// Mounts a directory through the library that links to libfuse. Throws Code::storage if the library or the mount fails.
std::unique_ptr<Session> open_session(const std::string& library, const std::string& directory, Handler& handler,
                                      const Options& options);

}  // namespace ff::fs3::mount

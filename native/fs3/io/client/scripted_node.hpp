// A storage node for tests: keeps chunks in memory and follows the wire protocol, except where a script breaks it.
//
// Thread contract: all calls from any thread; one thread for each connection.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/crc/crc32c.hpp"
#include "base/testing/check.hpp"
#include "base/testing/test_bytes.hpp"
#include "fs3/io/wire/wire.hpp"

namespace ff::fs3::io {

using Bytes = std::vector<std::byte>;

inline Bytes random_bytes(std::size_t size, std::uint64_t seed) {
  Bytes bytes(size);
  fill_random(bytes.data(), size, seed);
  return bytes;
}

struct ReceivedFrame {
  Head head;
  Bytes table, payload;
};

class ScriptedNode {
 public:
  // Sends the answer; returns false to close the connection. Called instead of `whole`, which sends the answer
  // correctly.
  using Script = std::function<bool(int fd, const ReceivedFrame& received, Bytes answer)>;

  // Called for a READ that is to be held, and for a go. If it returns none, the default handling follows; false closes
  // the connection.
  using Gate = std::function<std::optional<bool>(int fd, const ReceivedFrame& received)>;

  ~ScriptedNode() { stop(); }

  int connect() {
    int ends[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    std::lock_guard lock(mutex_);
    ++connections;
    ends_.push_back(ends[0]);
    threads_.emplace_back([this, fd = ends[0]] {
      ReceivedFrame received;
      while (read_frame(fd, received)) {
        if (!answer(fd, received)) break;
      }
      ::shutdown(fd, SHUT_RDWR);
    });
    return ends[1];
  }
  void stop() {  // as if the node's process had died
    std::vector<std::thread> threads;
    {
      std::lock_guard lock(mutex_);
      for (const int fd : ends_) ::shutdown(fd, SHUT_RDWR);
      threads.swap(threads_);
    }
    for (std::thread& thread : threads) thread.join();
    std::lock_guard lock(mutex_);
    for (const int fd : ends_) ::close(fd);
    ends_.clear();
  }
  void script(Script script) {
    std::lock_guard lock(mutex_);
    script_ = std::move(script);
  }
  void gate(Gate gate) {
    std::lock_guard lock(mutex_);
    gate_ = std::move(gate);
  }
  static Bytes ready(std::uint64_t request) {
    Head head;
    head.kind = FrameKind::ready;
    head.count = 1;
    head.request = request;
    Bytes frame(sizeof head);
    std::memcpy(frame.data(), &head, sizeof head);
    return frame;
  }
  void put(ChunkId chunk, Bytes bytes) {
    std::lock_guard lock(mutex_);
    chunks_[chunk] = std::move(bytes);
  }
  Bytes get(ChunkId chunk) {
    std::lock_guard lock(mutex_);
    return chunks_.at(chunk);
  }

  static bool whole(int fd, const Bytes& bytes) {
    for (std::size_t at = 0; at < bytes.size();) {
      const ssize_t sent = ::send(fd, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
      if (sent <= 0) return false;
      at += static_cast<std::size_t>(sent);
    }
    return true;
  }

  std::atomic<unsigned> connections = 0, frames = 0, reports = 0, reading = 0;
  std::atomic<bool> holds = true;  // honours requests to hold
  std::vector<WriteEntry> writes() {
    std::lock_guard lock(mutex_);
    return writes_;
  }

 private:
  static bool take(int fd, void* to, std::size_t bytes) {
    return bytes == 0 || ::recv(fd, to, bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes);
  }
  static bool read_frame(int fd, ReceivedFrame& received) {
    if (!take(fd, &received.head, sizeof received.head)) return false;
    CHECK(sound(received.head));
    received.table.resize(received.head.table_bytes);
    received.payload.resize(received.head.payload_bytes);
    return take(fd, received.table.data(), received.table.size()) &&
           take(fd, received.payload.data(), received.payload.size());
  }
  template <class T>
  static void append(Bytes& to, const T& value) {
    const auto* from = reinterpret_cast<const std::byte*>(&value);
    to.insert(to.end(), from, from + sizeof value);
  }

  bool answer(int fd, const ReceivedFrame& received) {
    ++frames;
    const bool held = holds && received.head.kind == FrameKind::read && (received.head.flags & kHold) != 0;
    if (held || received.head.kind == FrameKind::go) {
      Gate gate;
      {
        std::lock_guard lock(mutex_);
        gate = gate_;
      }
      if (held) {
        std::lock_guard lock(mutex_);
        held_[{fd, received.head.request}] = received;
      }
      const auto done = gate ? gate(fd, received) : std::nullopt;
      if (done) return *done;
    }
    if (held) return whole(fd, ready(received.head.request));
    if (received.head.kind == FrameKind::go) return go(fd, received);
    return do_it(fd, received);
  }

  bool go(int fd, const ReceivedFrame& received) {
    ReceivedFrame read;
    {
      std::lock_guard lock(mutex_);
      const auto found = held_.find({fd, received.head.request});
      CHECK(found != held_.end());  // an engine sends `go` once, and only after `ready`
      read = std::move(found->second);
      held_.erase(found);
    }
    return do_it(fd, read);
  }

  bool do_it(int fd, const ReceivedFrame& received) {
    Head head;
    head.count = received.head.count;
    head.request = received.head.request;
    Bytes table, payload;
    {
      std::lock_guard lock(mutex_);
      if (received.head.kind == FrameKind::read) read(received, head, table, payload);
      else if (received.head.kind == FrameKind::write) write(received, head, table);
      else if (received.head.kind == FrameKind::query_last) query(received, head, table);
      else return ++reports != 0;
    }
    head.table_bytes = static_cast<std::uint32_t>(table.size());
    head.payload_bytes = payload.size();
    Bytes answer;
    append(answer, head);
    answer.insert(answer.end(), table.begin(), table.end());
    answer.insert(answer.end(), payload.begin(), payload.end());
    Script script;
    {
      std::lock_guard lock(mutex_);
      script = script_;
    }
    return script ? script(fd, received, std::move(answer)) : whole(fd, answer);
  }

  void read(const ReceivedFrame& received, Head& head, Bytes& table, Bytes& payload) {
    CHECK(sound_read(received.head, received.table));
    head.kind = FrameKind::read_answer;
    Bytes crcs;
    for (std::size_t n = 0; n < received.head.count; ++n) {
      const auto entry = at<ReadEntry>(received.table, n);
      const auto found = chunks_.find({entry.inode, entry.index});
      ReadAnswer answer;
      answer.version = 7;
      if (found == chunks_.end()) {
        answer.status = Status::not_found;
      } else {
        const Bytes& chunk = found->second;
        answer.chunk_length = static_cast<std::uint32_t>(chunk.size());
        answer.offset = entry.offset - entry.offset % static_cast<std::uint32_t>(kBlock);
        const std::size_t end = std::min((entry.offset + entry.length + kBlock - 1) / kBlock * kBlock, chunk.size());
        answer.length = entry.offset < chunk.size() ? static_cast<std::uint32_t>(end - answer.offset) : 0;
        answer.crcs = pieces(answer.offset, answer.length);
        for (std::size_t from = answer.offset; from < answer.offset + answer.length; from += kBlock) {
          append(crcs, crc32c(0, chunk.data() + from, std::min(kBlock, answer.offset + answer.length - from)));
        }
        payload.insert(payload.end(), chunk.begin() + answer.offset, chunk.begin() + answer.offset + answer.length);
      }
      append(table, answer);
    }
    table.insert(table.end(), crcs.begin(), crcs.end());
  }

  void write(const ReceivedFrame& received, Head& head, Bytes& table) {
    CHECK(sound_write(received.head, received.table));
    head.kind = FrameKind::write_answer;
    std::size_t from = 0, crc_at = received.head.count * sizeof(WriteEntry);
    for (std::size_t n = 0; n < received.head.count; ++n) {
      const auto entry = at<WriteEntry>(received.table, n);
      writes_.push_back(entry);
      Bytes& chunk = chunks_[{entry.inode, entry.index}];
      if (entry.kind == Kind::write) {
        chunk.resize(std::max<std::size_t>(chunk.size(), entry.offset + entry.length));
        std::memcpy(chunk.data() + entry.offset, received.payload.data() + from, entry.length);
        for (std::uint32_t done = 0; done < entry.length;) {  // checks the CRCs, which end at block boundaries
          const auto step = static_cast<std::uint32_t>(
              std::min<std::size_t>(kBlock - (entry.offset + done) % kBlock, entry.length - done));
          std::uint32_t crc;
          std::memcpy(&crc, received.table.data() + crc_at, sizeof crc);
          CHECK(crc == crc32c(0, received.payload.data() + from + done, step));
          crc_at += sizeof crc;
          done += step;
        }
        from += entry.length;
      } else {
        chunk.resize(entry.kind == Kind::remove ? 0 : entry.length);
      }
      append(table, WriteAnswer{7, static_cast<std::uint32_t>(chunk.size()), Status::ok, {}});
    }
  }

  void query(const ReceivedFrame& received, Head& head, Bytes& table) {
    head.kind = FrameKind::query_answer;
    for (std::size_t n = 0; n < received.head.count; ++n) {
      const auto entry = at<QueryEntry>(received.table, n);
      QueryAnswer answer;
      answer.status = Status::not_found;
      for (const auto& [id, bytes] : chunks_) {
        if (id.inode != entry.inode || id.index > entry.upto) continue;
        const bool next = answer.run != 0 && answer.index + entry.stride == id.index;
        const std::uint32_t run = next ? std::min(answer.run + 1, kMostRun) : 1;
        answer = {id.index, static_cast<std::uint32_t>(bytes.size()), run, Status::ok, {}};
      }
      append(table, answer);
    }
  }

  std::mutex mutex_;  // guards the members below
  std::map<ChunkId, Bytes> chunks_;
  std::vector<WriteEntry> writes_;
  Script script_;
  Gate gate_;
  std::map<std::pair<int, std::uint64_t>, ReceivedFrame> held_;  // by connection and request
  std::vector<int> ends_;
  std::vector<std::thread> threads_;
};

}  // namespace ff::fs3::io

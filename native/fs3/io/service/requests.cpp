// Handlers of a service for each kind of frame.
#include <fcntl.h>
#include <sys/sendfile.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "fs3/io/service/service.hpp"
#include "fs3/io/target/peers.hpp"

namespace ff::fs3::io {
namespace {

constexpr std::size_t kSendfile = std::size_t{64} << 10;  // from this size on bytes are sent by sendfile

// Copies the bytes if all of them are in the page cache. Otherwise starts reading them from the disk.
bool copy_cached(int file, const store::Reading& reading, std::byte* to) {
  const iovec part{to, reading.length};
  if (::preadv2(file, &part, 1, static_cast<off_t>(reading.position), RWF_NOWAIT) ==
      static_cast<ssize_t>(reading.length))
    return true;
  ::posix_fadvise(file, static_cast<off_t>(reading.position), reading.length, POSIX_FADV_WILLNEED);
  return false;
}

// Waits until the bytes are in the page cache, without copying them: sends the pages to `nowhere` (/dev/null). Errors
// are reported when the bytes are sent to the client.
void bring(int file, const store::Reading& reading, int nowhere) {
  off_t at = static_cast<off_t>(reading.position);
  const off_t end = at + static_cast<off_t>(reading.length);
  while (at < end) {
    const ssize_t done = ::sendfile(nowhere, file, &at, static_cast<std::size_t>(end - at));
    if (done <= 0 && !(done < 0 && errno == EINTR)) return;
  }
}

}  // namespace

// A READ frame in progress; the thread that completes its last Reading sends the answer.
struct Service::ReadJob : HeldReads::Read {
  explicit ReadJob(Shared to, HeldReads::Read read = {})
      : HeldReads::Read(std::move(read)), connection(std::move(to)) {}
  const Shared connection;
  std::atomic<std::size_t> left = 0;
  const Target::Clock::time_point begun = Target::Clock::now();
};

struct Service::WriteJob {
  Shared connection;
  Head head;
  std::vector<WriteAnswer> answers;
  std::atomic<std::size_t> left;
  const Target::Clock::time_point begun = Target::Clock::now();
};

bool Service::handle(const Shared& connection, Frame& frame) {
  if (connection->sharing ? !connection->sharing->done(frame.head.done) : frame.head.done != 0) return false;
  switch (frame.head.kind) {
    case FrameKind::read: return read(connection, frame);
    case FrameKind::write: return write(connection, frame);
    case FrameKind::message: return message(connection, frame);
    case FrameKind::query_last: query(connection, frame); return true;
    case FrameKind::report: report(frame); return true;
    case FrameKind::go: return go(connection, frame.head);
    default: return false;
  }
}

// Reads the entries of one target together.
bool Service::read(const Shared& connection, Frame& frame) {
  if (!sound_read(frame.head, frame.table)) return false;
  const std::size_t count = frame.head.count;
  const auto job = std::make_shared<ReadJob>(connection);
  job->head = frame.head;
  job->readings.resize(count);
  job->targets.resize(count);
  job->left = count;
  const Target::Later later = [this, job](std::size_t n, store::Reading found) {
    job->readings[n] = std::move(found);
    if (job->left.fetch_sub(1) == 1) finish(job);
  };
  std::array<Target::Numbered, kMostEntries> reads;
  std::size_t open = count, answered = 0;  // the first `open` entries of `reads` were not passed to a target yet
  for (std::size_t n = 0; n < count; ++n) reads[n] = {n, at<ReadEntry>(frame.table, n)};
  job->table = std::move(frame.table);
  while (open != 0) {
    const std::uint32_t chain = reads[0].entry.chain;
    const auto same = std::ranges::partition(std::span(reads).first(open),
                                             [chain](const auto& read) { return read.entry.chain != chain; });
    open -= same.size();
    const auto target = serving(chain);
    for (const auto& read : same) {
      job->targets[read.number] = target;
      if (!target) job->readings[read.number].status = Status::stale_routing;
    }
    answered += target ? target->read({same.begin(), same.end()}, job->readings, later) : same.size();
  }
  reads_ += count;
  if (answered != 0 && job->left.fetch_sub(answered) == answered) finish(job);
  return true;
}

void Service::finish(const std::shared_ptr<ReadJob>& job) {
  reading_.add(Target::Clock::now() - job->begun);
  if ((job->head.flags & kLocal) != 0 && job->connection->sharing && share(*job)) return;
  if ((job->head.flags & kHold) != 0 && much(*job) && job->connection->holding.begin(job->head.request)) fetch(job);
  else send(*job);
}

bool Service::much(const ReadJob& job) {
  std::uint64_t bytes = 0;
  for (const auto& reading : job.readings) bytes += reading.status == Status::ok ? reading.length : 0;
  return bytes > kHoldFrom;
}

// Only half of the workers wait for the disk here; the other workers send the bytes meanwhile.
void Service::fetch(std::shared_ptr<ReadJob> job) {
  for (std::size_t n = 0; n < job->readings.size(); ++n) {
    const auto& reading = job->readings[n];
    if (reading.status != Status::ok || reading.length == 0) continue;
    ::posix_fadvise(job->targets[n]->descriptor(reading.file), static_cast<off_t>(reading.position), reading.length,
                    POSIX_FADV_WILLNEED);
  }
  {
    std::lock_guard lock(jobs_mutex_);
    if (fetching_ >= std::max<std::size_t>(1, workers_.size() / 2)) {
      fetches_.push_back(std::move(job));
      return;
    }
    ++fetching_;
  }
  later([this, job] { run_fetch(job); });
}

void Service::run_fetch(const std::shared_ptr<ReadJob>& job) {
  fetched(*job);
  std::shared_ptr<ReadJob> next;
  {
    std::lock_guard lock(jobs_mutex_);
    if (fetches_.empty()) {
      --fetching_;
      return;
    }
    next = std::move(fetches_.front());
    fetches_.pop_front();
  }
  later([this, next] { run_fetch(next); });
}

void Service::fetched(ReadJob& job) {
  const Shared& connection = job.connection;
  if (connection->line.broken()) return;
  for (std::size_t n = 0; n < job.readings.size(); ++n) {
    const auto& reading = job.readings[n];
    if (reading.status == Status::ok) bring(job.targets[n]->descriptor(reading.file), reading, nowhere_);
  }
  Outgoing outgoing;
  Head head;
  head.kind = FrameKind::ready;
  head.count = 1;
  head.request = job.head.request;
  outgoing.table.resize(sizeof head);
  put(outgoing.table, 0, head);
  outgoing.add(outgoing.table.data(), outgoing.table.size());
  auto targets = job.targets;
  targets.erase(std::unique(targets.begin(), targets.end()), targets.end());
  if (!connection->holding.keep(std::move(job))) return;
  for (const auto& target : targets) {  // remove() of a target may have called `forget` before `keep`
    if (target && of_id(target->id()) != target) connection->holding.forget(*target);
  }
  answer(connection, std::move(outgoing));
}

bool Service::go(const Shared& connection, const Head& head) {
  auto read = connection->holding.take(head.request);
  if (!read) return false;
  if (!read->readings.empty()) {
    ReadJob job(connection, std::move(*read));
    send(job);
    return true;
  }
  Frame again{read->head, std::move(read->table), {}};
  again.head.flags &= static_cast<std::uint8_t>(~kHold);
  return this->read(connection, again);
}

void Service::send(ReadJob& job) {
  const std::size_t count = job.readings.size();
  std::size_t crcs = 0, bytes = 0, small = 0;
  for (const auto& reading : job.readings) {
    if (reading.status != Status::ok) continue;
    crcs += reading.crcs.size();
    bytes += reading.length;
    if (reading.length < kSendfile) small += reading.length;
  }
  Outgoing outgoing;
  auto& table = outgoing.table;
  Head head;
  head.kind = FrameKind::read_answer;
  head.count = static_cast<std::uint16_t>(count);
  head.table_bytes = static_cast<std::uint32_t>(count * sizeof(ReadAnswer) + crcs * sizeof(std::uint32_t));
  head.payload_bytes = bytes;
  head.request = job.head.request;
  table.resize(sizeof head + head.table_bytes);
  put(table, 0, head);
  outgoing.add(table.data(), table.size());
  if (small != 0) outgoing.buffer = pools_[0].take(small);  // without a buffer, the bytes are sent from the files

  struct Held {
    std::vector<std::shared_ptr<Target>> targets;  // outlive their readings
    std::vector<store::Reading> readings;
  };
  auto held = std::make_shared<Held>();
  std::vector<std::pair<std::size_t, std::byte*>> cold;
  std::size_t crc_at = sizeof head + count * sizeof(ReadAnswer), filled = 0;
  for (std::size_t n = 0; n < count; ++n) {
    auto& reading = job.readings[n];
    const ReadAnswer answer = answer_of(reading);
    if (reading.status == Status::ok) {
      if (!reading.crcs.empty()) {
        std::memcpy(table.data() + crc_at, reading.crcs.data(), reading.crcs.size() * sizeof(std::uint32_t));
        crc_at += reading.crcs.size() * sizeof(std::uint32_t);
      }
      if (reading.length != 0 && reading.length < kSendfile && outgoing.buffer) {
        std::byte* to = outgoing.buffer.data() + filled;
        if (!copy_cached(job.targets[n]->descriptor(reading.file), reading, to)) cold.emplace_back(n, to);
        outgoing.add(to, reading.length);
        filled += reading.length;
      } else if (reading.length != 0) {
        outgoing.add_file(job.targets[n]->descriptor(reading.file), reading.position, reading.length);
        held->readings.push_back(std::move(reading));
        held->targets.push_back(job.targets[n]);
      }
    }
    put(table, sizeof head + n * sizeof(ReadAnswer), answer);
  }
  for (const auto& [n, to] : cold) {  // the disk already reads all of them
    const auto& reading = job.readings[n];
    if (reading.copy(to) != Status::ok) std::memset(to, 0, reading.length);  // the reader's CRC check reveals it
  }
  store::Reading::release(job.readings);
  job.readings.clear();
  outgoing.holds.push_back(std::move(held));
  read_bytes_ += bytes;
  answer(job.connection, std::move(outgoing));
}

// Answers with places in files, so that the client reads the bytes itself.
bool Service::share(ReadJob& job) {
  std::uint64_t bytes = 0;
  for (const auto& reading : job.readings) bytes += reading.status == Status::ok ? reading.length : 0;
  if (!job.connection->sharing->give(job.head.request, job.readings, job.targets)) return false;
  read_bytes_ += bytes;
  local_bytes_ += bytes;
  push(job.connection);
  return true;
}

bool Service::write(const Shared& connection, Frame& frame) {
  if (!sound_write(frame.head, frame.table)) return false;
  const std::size_t count = frame.head.count;
  auto job = std::make_shared<WriteJob>();
  job->connection = connection;
  job->head = frame.head;
  job->answers.resize(count);
  job->left = count;
  const auto payload = std::make_shared<Buffer>(std::move(frame.payload));
  std::size_t from = 0, crc_at = count * sizeof(WriteEntry);
  for (std::size_t n = 0; n < count; ++n) {
    const auto entry = at<WriteEntry>(frame.table, n);
    const auto done = [this, job, n](Status status, Version version, std::uint32_t length) {
      job->answers[n].status = status;
      job->answers[n].version = version;
      job->answers[n].length = length;
      if (job->left.fetch_sub(1) != 1) return;
      writing_.add(Target::Clock::now() - job->begun);
      Outgoing outgoing;
      Head head;
      head.kind = FrameKind::write_answer;
      head.count = static_cast<std::uint16_t>(job->answers.size());
      head.table_bytes = static_cast<std::uint32_t>(job->answers.size() * sizeof(WriteAnswer));
      head.request = job->head.request;
      outgoing.table.resize(sizeof head + head.table_bytes);
      put(outgoing.table, 0, head);
      std::memcpy(outgoing.table.data() + sizeof head, job->answers.data(), head.table_bytes);
      outgoing.add(outgoing.table.data(), outgoing.table.size());
      answer(job->connection, std::move(outgoing));
    };
    Content content;
    if (entry.kind == Kind::write) {
      content.bytes = {payload->data() + from, entry.length};
      const auto crcs = std::span<const std::byte>(frame.table).subspan(crc_at, entry.crcs * sizeof(std::uint32_t));
      if (!holds(content.bytes, entry.offset, crcs)) {
        ++mismatched_;
        return false;
      }
      content.crcs.resize(entry.crcs);
      if (entry.crcs != 0)
        std::memcpy(content.crcs.data(), frame.table.data() + crc_at, entry.crcs * sizeof(std::uint32_t));
      content.holder = payload;
      from += entry.length;
      crc_at += entry.crcs * sizeof(std::uint32_t);
      written_bytes_ += entry.length;
    }
    if (const auto target = head_of(entry.chain)) target->write(entry, std::move(content), done);
    else done(Status::stale_routing, 0, 0);
  }
  writes_ += count;
  return true;
}

bool Service::message(const Shared& connection, Frame& frame) {
  auto posted = decode(frame.table);
  if (!posted) return false;
  ++messages_;
  const auto* const update = std::get_if<replica::Update>(&posted->message);
  const bool written = update != nullptr && update->kind == Kind::write;
  const std::uint32_t offset = written ? update->offset : 0;
  replica::Op answers = 0;
  std::visit(
      [&](const auto& m) {
        if (asks(posted->message) == 0) answers = m.op;
        peers_->remember_route(m.from, connection);
      },
      posted->message);
  Content content;
  content.bytes = {frame.payload.data(), static_cast<std::size_t>(frame.head.payload_bytes)};
  content.crcs = std::move(posted->crcs);
  const bool tags = std::holds_alternative<replica::SyncDone>(posted->message) ||
                    std::holds_alternative<replica::Tags>(posted->message);
  if (tags ? !decode_tags(content.bytes)
           : content.crcs.size() != pieces(offset, static_cast<std::uint32_t>(content.bytes.size()))) {
    return false;
  }
  // Only bytes of WRITEs are compared with their CRCs here. The sender of whole chunks compared them when it read them
  // from its disk, and every later read compares them again.
  if (written && !holds(content.bytes, offset, std::as_bytes(std::span(content.crcs)))) {
    ++mismatched_;
    return false;
  }
  if (answers != 0 && !peers_->answered(posted->to, answers)) return true;  // too late
  const bool carries = tags || update != nullptr || std::holds_alternative<replica::Fetched>(posted->message);
  if (carries) content.holder = std::make_shared<Buffer>(std::move(frame.payload));
  if (const auto target = of_id(posted->to)) target->receive(std::move(posted->message), std::move(content));
  return true;
}

void Service::query(const Shared& connection, const Frame& frame) {
  Outgoing outgoing;
  Head head;
  head.kind = FrameKind::query_answer;
  head.count = frame.head.count;
  head.table_bytes = static_cast<std::uint32_t>(frame.head.count * sizeof(QueryAnswer));
  head.request = frame.head.request;
  outgoing.table.resize(sizeof head + head.table_bytes);
  put(outgoing.table, 0, head);
  for (std::size_t n = 0; n < frame.head.count; ++n) {
    const auto entry = at<QueryEntry>(frame.table, n);
    const auto target = serving(entry.chain);
    QueryAnswer found;
    found.status = Status::stale_routing;
    if (target) target->last(entry, found);
    put(outgoing.table, sizeof head + n * sizeof found, found);
  }
  outgoing.add(outgoing.table.data(), outgoing.table.size());
  answer(connection, std::move(outgoing));
}

void Service::report(const Frame& frame) {
  reported_ += frame.head.count;
  for (std::size_t n = 0; n < frame.head.count; ++n) {
    const auto entry = at<ReadEntry>(frame.table, n);
    for (const auto& target : of_chain(entry.chain)) target->suspect({entry.inode, entry.index});
  }
}

}  // namespace ff::fs3::io

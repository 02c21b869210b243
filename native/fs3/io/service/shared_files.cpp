#include "fs3/io/service/shared_files.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace ff::fs3::io {
namespace {

// Opens the file again, read-only; returns -1 if that fails.
int read_only(int fd) { return ::open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDONLY | O_CLOEXEC); }

}  // namespace

ReadAnswer answer_of(const store::Reading& reading) {
  ReadAnswer answer;
  answer.status = reading.status;
  answer.version = reading.version;
  if (reading.status != Status::ok) return answer;
  answer.chunk_length = reading.chunk_length;
  answer.offset = reading.offset;
  answer.length = reading.length;
  answer.crcs = static_cast<std::uint32_t>(reading.crcs.size());
  return answer;
}

struct SharedFiles::Files {
  std::vector<int> descriptors;
  ~Files() {
    for (const int fd : descriptors) ::close(fd);
  }
};

struct SharedFiles::Plan {
  std::vector<Place> places;
  std::shared_ptr<Files> files = std::make_shared<Files>();
  std::vector<std::pair<Slot*, Slot>> replaced;  // slots and their former contents
};

SharedFiles::Slot* SharedFiles::find(const std::shared_ptr<Target>& target, store::File file) {
  const auto holds = [&](const Slot& slot) {
    return slot.file == file && !slot.target.owner_before(target) && !target.owner_before(slot.target);
  };
  if (holds(slots_[last_])) return &slots_[last_];
  const auto found = std::find_if(slots_.begin(), slots_.end(), holds);
  return found == slots_.end() ? nullptr : &*found;
}

bool SharedFiles::plan(const std::vector<store::Reading>& readings, const std::vector<std::shared_ptr<Target>>& targets,
                       Plan& plan) {
  for (std::size_t n = 0; n < readings.size(); ++n) {
    auto& place = plan.places.emplace_back();
    if (readings[n].status != Status::ok || readings[n].length == 0) continue;
    Slot* slot = find(targets[n], readings[n].file);
    if (!slot) {
      slot = &*std::min_element(slots_.begin(), slots_.end(),
                                [](const Slot& a, const Slot& b) { return a.used < b.used; });
      if (slot->used == answers_) return false;  // this answer needs all slots
      const int fd = targets[n]->descriptor(readings[n].file);
      const int given = fd < 0 ? -1 : read_only(fd);
      if (given < 0) return false;
      plan.files->descriptors.push_back(given);
      plan.replaced.emplace_back(slot, std::exchange(*slot, Slot{targets[n], readings[n].file, 0}));
      place.fresh = 1;
    }
    slot->used = answers_;
    last_ = static_cast<std::size_t>(slot - slots_.data());
    place.slot = static_cast<std::uint16_t>(last_);
    place.position = readings[n].position;
  }
  return true;
}

bool SharedFiles::give(std::uint64_t request, std::vector<store::Reading>& readings,
                       std::vector<std::shared_ptr<Target>>& targets) {
  std::uint64_t bytes = 0;
  std::size_t crcs = 0;
  for (const auto& reading : readings) {
    if (reading.status != Status::ok) continue;
    bytes += reading.length;
    crcs += reading.crcs.size();
  }
  const std::lock_guard lock(mutex_);
  if (held_.size() >= kMostFrames || (!held_.empty() && bytes_ + bytes > kMostBytes)) return false;
  Plan plan;
  ++answers_;
  if (!this->plan(readings, targets, plan)) {
    for (auto& [slot, old] : plan.replaced) *slot = std::move(old);
    return false;
  }
  Head head;
  head.kind = FrameKind::read_answer;
  head.flags = kLocal;
  head.count = static_cast<std::uint16_t>(readings.size());
  head.table_bytes =
      static_cast<std::uint32_t>(readings.size() * (sizeof(ReadAnswer) + sizeof(Place)) + crcs * sizeof(std::uint32_t));
  head.request = request;
  Outgoing outgoing;
  auto& table = outgoing.table;
  table.resize(sizeof head + head.table_bytes);
  put(table, 0, head);
  std::size_t answer_at = sizeof head, crc_at = answer_at + readings.size() * sizeof(ReadAnswer);
  for (const auto& reading : readings) {
    put(table, answer_at, answer_of(reading));
    answer_at += sizeof(ReadAnswer);
    if (reading.status != Status::ok || reading.crcs.empty()) continue;
    std::memcpy(table.data() + crc_at, reading.crcs.data(), reading.crcs.size() * sizeof(std::uint32_t));
    crc_at += reading.crcs.size() * sizeof(std::uint32_t);
  }
  std::memcpy(table.data() + crc_at, plan.places.data(), plan.places.size() * sizeof(Place));
  outgoing.add(table.data(), table.size());
  outgoing.descriptors = plan.files->descriptors;
  if (!outgoing.descriptors.empty()) outgoing.holds.push_back(std::move(plan.files));
  held_.push_back({std::move(targets), std::move(readings), bytes, Clock::now()});
  bytes_ += bytes;
  line_.send(std::move(outgoing));
  return true;
}

bool SharedFiles::done(std::uint32_t count) {
  std::vector<Held> gone;  // released without the lock
  {
    const std::lock_guard lock(mutex_);
    const std::uint32_t fresh = count - done_;
    if (fresh > held_.size()) return false;
    for (std::uint32_t n = 0; n < fresh; ++n) {
      bytes_ -= held_.front().bytes;
      gone.push_back(std::move(held_.front()));
      held_.pop_front();
    }
    done_ = count;
  }
  for (Held& held : gone) store::Reading::release(held.readings);
  return true;
}

template <class Which>
std::vector<SharedFiles::Held> SharedFiles::take(const Which& which) {
  std::vector<Held> taken;
  for (Held& held : held_) {
    if (held.readings.empty() || !which(held)) continue;
    bytes_ -= held.bytes;
    taken.push_back(std::exchange(held, Held{}));
  }
  return taken;
}

void SharedFiles::expire(Clock::time_point now) {
  std::vector<Held> gone;
  const std::lock_guard lock(mutex_);
  gone = take([now](const Held& held) { return now - held.since > kLocalTime; });
}

void SharedFiles::forget(const Target& target) {
  std::vector<Held> gone;
  const std::lock_guard lock(mutex_);
  gone = take([&](const Held& held) {
    return std::any_of(held.targets.begin(), held.targets.end(), [&](const auto& one) { return one.get() == &target; });
  });
}

void SharedFiles::clear() {
  std::vector<Held> gone;
  const std::lock_guard lock(mutex_);
  gone = take([](const Held&) { return true; });
}

std::size_t SharedFiles::held() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::size_t>(
      std::count_if(held_.begin(), held_.end(), [](const Held& held) { return !held.readings.empty(); }));
}

}  // namespace ff::fs3::io

// A copy from a fake device runs after the earlier work in the user's stream, and with `follow` before the later work.
// Exactly the pieces' bytes are written, and changes are reported. Memory is pinned once. A device's failure is
// reported, and a destroyed copy accesses no source.
#include "checkpoint/device_copy.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "base/error.hpp"
#include "base/testing/check.hpp"
#include "hfreduce/device/stager_fake.hpp"

namespace ff::checkpoint {
namespace {

using namespace std::chrono_literals;
using hfreduce::FakeDevice;

constexpr char kUntouched = 0x55;
constexpr std::size_t kBlock = 8192;
constexpr std::size_t kArena = std::size_t{2} << 20;

// Pieces of many sizes with gaps between them.
struct State {
  std::vector<std::vector<char>> tensors;
  std::vector<Piece> pieces;
  std::size_t bytes = 0;

  explicit State(unsigned seed, std::size_t count = 40, std::size_t most = 30'000) {
    std::mt19937 random(seed);
    std::size_t end = 0;
    for (std::size_t i = 0; i < count; ++i) {
      std::vector<char>& tensor = tensors.emplace_back(random() % 4 == 0 ? random() % 100 : random() % most);
      for (char& byte : tensor) byte = static_cast<char>(random());
      end += random() % 100;
      pieces.push_back({tensor.data(), end, tensor.size()});
      end += tensor.size();
      bytes += tensor.size();
    }
  }

  bool holds(const Memory& memory) const {
    std::size_t at = 0;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      for (; at < pieces[i].offset; ++at) {
        if (memory.data()[at] != kUntouched) return false;
      }
      at += pieces[i].bytes;
      if (!std::equal(tensors[i].begin(), tensors[i].end(), memory.data() + pieces[i].offset)) return false;
    }
    return memory.data()[at] == kUntouched;
  }
};

std::shared_ptr<const Memory> fresh_memory(FakeDevice& device) {
  auto memory = std::make_shared<const Memory>(kArena);
  std::memset(memory->data(), kUntouched, memory->size());
  memory->pin(device);
  return memory;
}

DeviceCopyOptions mode(bool compare, bool follow) { return {.compare = compare, .follow = follow, .block = kBlock}; }

template <typename Action>
void check_throws(Code code, Action action) {
  bool thrown = false;
  try {
    action();
  } catch (const Error& error) {
    thrown = error.code() == code;
  }
  CHECK(thrown);
}

std::size_t count(const FakeDevice& device, const std::string& command) {
  std::size_t found = 0;
  for (const std::string& line : device.history()) found += line.find(command) != std::string::npos;
  return found;
}

// The copy has the results of the earlier work in the user's stream. With `follow` it has no results of later work.
void the_order_of_the_streams_holds(bool compare, bool follow) {
  FakeDevice device(20us);
  const auto memory = fresh_memory(device);
  const auto lane = std::make_shared<DeviceLane>(device);
  const auto user = device.make_stream();
  State state(1);
  const std::vector<char> computed(state.tensors[1].size(), 7), later(state.tensors[1].size(), 9);
  device.stop(user);
  device.copy(user, state.tensors[1].data(), computed.data(), computed.size());
  DeviceCopy copy(lane, memory, state.pieces, user, mode(compare, follow));
  if (follow) device.copy(user, state.tensors[1].data(), later.data(), later.size());
  CHECK(!copy.done() && copy.staged() <= state.pieces[1].offset);
  device.go_on(user);
  copy.wait(SIZE_MAX);
  CHECK(copy.done());
  CHECK(copy.staged() == state.pieces.back().offset + state.pieces.back().bytes);
  device.synchronize(user);
  CHECK(state.tensors[1] == (follow ? later : computed));
  state.tensors[1] = computed;
  CHECK(state.holds(*memory));
  device.synchronize(lane->stream());  // the device's history lists a command only after the command has run
  CHECK(count(device, "call") == (state.bytes + kBlock - 1) / kBlock);
}

void reported_prefixes_are_in_place(bool compare) {
  FakeDevice device(50us);
  const auto memory = fresh_memory(device);
  const auto lane = std::make_shared<DeviceLane>(device);
  const State state(2);
  DeviceCopy copy(lane, memory, state.pieces, device.make_stream(), mode(compare, false));
  for (std::size_t i = 0; i < state.pieces.size(); ++i) {
    const Piece& piece = state.pieces[i];
    copy.wait(piece.offset + piece.bytes);
    CHECK(copy.staged() >= piece.offset + piece.bytes || piece.bytes == 0);
    CHECK(std::equal(piece.source, piece.source + piece.bytes, memory->data() + piece.offset));
  }
  copy.wait(SIZE_MAX);
  CHECK(state.holds(*memory));
}

void changes_are_told() {
  FakeDevice device;
  const auto memory = fresh_memory(device);
  const auto lane = std::make_shared<DeviceLane>(device);
  const auto user = device.make_stream();
  State state(3);
  DeviceCopy(lane, memory, state.pieces, user, mode(false, false)).wait(SIZE_MAX);
  std::size_t pinned = 0;
  for (const std::size_t other : {std::size_t{5}, std::size_t{17}}) {
    state.tensors[other].back() ^= 1;
    DeviceCopy copy(lane, memory, state.pieces, user, mode(true, false));
    copy.wait(SIZE_MAX);
    for (std::size_t i = 0; i < state.pieces.size(); ++i) CHECK(copy.changed(i) == (i == other));
    CHECK(state.holds(*memory));
    CHECK(pinned == 0 || device.pinned_bytes() == pinned);  // the windows of the first copy are reused
    pinned = device.pinned_bytes();
  }
}

void memory_is_pinned_once_and_until_it_is_freed() {
  FakeDevice device, other;
  {
    const auto memory = fresh_memory(device);
    memory->pin(device);
    CHECK(device.pinned_bytes() == memory->size() && other.pinned_bytes() == 0);
    memory->pin(other);
    CHECK(other.pinned_bytes() == memory->size());
  }
  CHECK(device.pinned_bytes() == 0 && other.pinned_bytes() == 0);
  Memory theirs(kArena);
  CHECK(device.pin(theirs.data(), theirs.size()));
  theirs.pin(device);  // pinned before by the test, which still owns the pin
  {
    const auto lane = std::make_shared<DeviceLane>(device);
    Arena arena;
    arena.reserve(kArena);
    arena.memory()->pin(device);
    const State state(4);
    const auto user = device.make_stream();
    DeviceCopy copy(lane, arena.memory(), state.pieces, user, mode(true, false));
    arena.reserve(2 * kArena);  // the copy keeps the old pages alive
    copy.wait(SIZE_MAX);
  }
  CHECK(device.pinned_bytes() == theirs.size());
  device.unpin(theirs.data());
}

void a_destroyed_copy_waits_for_the_device(bool compare) {
  FakeDevice device(20us);
  const auto memory = fresh_memory(device);
  const auto lane = std::make_shared<DeviceLane>(device);
  const auto user = device.make_stream();
  State state(5);
  {
    DeviceCopy copy(lane, memory, state.pieces, user, mode(compare, false));
  }
  const std::vector<char> before(memory->data(), memory->data() + memory->size());
  for (auto& tensor : state.tensors) std::fill(tensor.begin(), tensor.end(), 1);
  device.synchronize(lane->stream());
  CHECK(std::memcmp(before.data(), memory->data(), before.size()) == 0);
}

// Accepts `copies` copies, then throws; `probe` throws once `broken` is set.
class Failing final : public FakeDevice {
 public:
  explicit Failing(std::size_t copies) : left_(copies) {}
  void to_host(Stream stream, char* host, const char* device, std::size_t bytes) override {
    if (left_ == 0) throw Error(Code::collective, "to_host failed");
    --left_;
    FakeDevice::to_host(stream, host, device, bytes);
  }
  void probe(Stream stream) override {
    if (broken) throw Error(Code::collective, "the device has failed");
    FakeDevice::probe(stream);
  }
  std::atomic<bool> broken = false;

 private:
  std::atomic<std::size_t> left_;
};

void failures_are_told() {
  const State state(6);
  {
    Failing device(3);  // fails during the start of the copy
    const auto memory = fresh_memory(device);
    const auto lane = std::make_shared<DeviceLane>(device);
    const auto user = device.make_stream();
    check_throws(Code::collective, [&] { DeviceCopy(lane, memory, state.pieces, user, mode(false, false)); });
    device.synchronize(lane->stream());
  }
  {
    Failing device(12);  // fails in the copy's thread
    const auto memory = fresh_memory(device);
    const auto lane = std::make_shared<DeviceLane>(device);
    DeviceCopy copy(lane, memory, state.pieces, device.make_stream(), mode(true, false));
    check_throws(Code::collective, [&] { copy.wait(SIZE_MAX); });
    CHECK(!copy.done());
    device.synchronize(lane->stream());
  }
  for (const bool compare : {false, true}) {
    Failing device(SIZE_MAX);
    const auto memory = fresh_memory(device);
    const auto lane = std::make_shared<DeviceLane>(device);
    const auto user = device.make_stream();
    device.stop(user);
    {
      DeviceCopy copy(lane, memory, state.pieces, user, mode(compare, false));
      device.broken = true;
      check_throws(Code::collective, [&] { copy.wait(SIZE_MAX); });
    }  // the destructor does not wait
    device.go_on(user);
    device.synchronize(lane->stream());
  }
}

void misuse_is_told() {
  FakeDevice device;
  const auto memory = fresh_memory(device);
  const auto lane = std::make_shared<DeviceLane>(device);
  const auto user = device.make_stream();
  const State state(7);
  check_throws(Code::invalid, [&] { DeviceCopy(lane, memory, state.pieces, user, mode(true, true)); });
  check_throws(Code::invalid, [&] { DeviceCopy(lane, nullptr, state.pieces, user, mode(false, false)); });
  DeviceCopy nothing(lane, memory, {}, user, mode(true, false));
  nothing.wait(SIZE_MAX);
  CHECK(nothing.done() && nothing.staged() == 0);
}

void a_forked_child_waits_for_nothing() {
  FakeDevice device;
  const auto memory = fresh_memory(device);
  auto lane = std::make_shared<DeviceLane>(device);
  const auto user = device.make_stream();
  const State state(8);
  auto copy = std::make_unique<DeviceCopy>(lane, memory, state.pieces, user, mode(true, false));
  const pid_t child = ::fork();
  if (child == 0) {
    check_throws(Code::cancelled, [&] { copy->wait(SIZE_MAX); });
    check_throws(Code::cancelled, [&] { DeviceCopy(lane, memory, state.pieces, user, mode(false, false)); });
    copy = nullptr;
    lane = nullptr;
    ::_exit(0);
  }
  int status = 1;
  CHECK(::waitpid(child, &status, 0) == child && status == 0);
  copy->wait(SIZE_MAX);
  CHECK(state.holds(*memory));
}

}  // namespace
}  // namespace ff::checkpoint

int main() {
  using namespace ff::checkpoint;
  the_order_of_the_streams_holds(false, false);
  the_order_of_the_streams_holds(false, true);
  the_order_of_the_streams_holds(true, false);
  for (const bool compare : {false, true}) {
    reported_prefixes_are_in_place(compare);
    a_destroyed_copy_waits_for_the_device(compare);
  }
  changes_are_told();
  memory_is_pinned_once_and_until_it_is_freed();
  failures_are_told();
  misuse_is_told();
  a_forked_child_waits_for_nothing();
}

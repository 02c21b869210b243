// Calls on the memory of a fake device, by groups of one and of two ranks inside this process.
#include "hfreduce/device/stager.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <new>
#include <thread>

#include "base/testing/check.hpp"
#include "hfreduce/device/stager_fake.hpp"
#include "hfreduce/engine/arena.hpp"
#include "hfreduce/engine/group.hpp"

namespace ff::hfreduce {
namespace {

using namespace std::chrono_literals;

constexpr double kTimeout = 30;

std::unique_ptr<Group> lone_group(double timeout_s) {
  return std::make_unique<Group>(Group::Config{0, 1, timeout_s, Layout{{{0}}, 0, 0, {0}}}, nullptr);
}

// Returns the groups of the two ranks of one host.
std::array<std::unique_ptr<Group>, 2> pair_of_groups() {
  Segment control = Segment::create("stager-test", Team::control_bytes(2));
  Segment same = Segment::attach(::dup(control.fd()));
  std::array<int, 2> sockets;
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, sockets.data()) == 0);
  const auto make = [&](std::size_t me, Segment segment) {
    std::vector<Member> members{{0, me == 0 ? -1 : sockets[1], -1}, {1, me == 1 ? -1 : sockets[0], -1}};
    return std::make_unique<Group>(Group::Config{static_cast<int>(me), 2, kTimeout, Layout{{{0, 1}}, 0, me, {0}}},
                                   std::make_unique<Team>(std::move(segment), std::move(members), me, false));
  };
  return {make(0, std::move(control)), make(1, std::move(same))};
}

char* bytes(std::vector<float>& values) { return reinterpret_cast<char*>(values.data()); }

Request allreduce_of(std::vector<float>& tensor) {
  Request request;
  request.call.kind = Kind::allreduce;
  request.call.dtype = DType::f32;
  request.call.count = tensor.size();
  request.in = request.out = {{bytes(tensor), tensor.size() * sizeof(float)}};
  return request;
}

struct Submitted {
  std::vector<std::shared_ptr<Operation>> operations;
  std::shared_ptr<Passage> passage;
};

Submitted submit(Group& group, Stager& stager, const Request& request, const std::vector<std::uint64_t>& counts,
                 Device::Stream user) {
  auto staged = stager.stage(request, counts, user);
  Submitted submitted{{}, staged.passage};
  for (Request& part : staged.operations) submitted.operations.push_back(group.submit(std::move(part), false));
  return submitted;
}

bool all_equal(const std::vector<float>& values, float expected) {
  return std::all_of(values.begin(), values.end(), [=](float v) { return v == expected; });
}

bool all_nan(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return std::isnan(v); });
}

// Each rank computes its input, reduces it and reads the result, all in one stream that is stopped until everything has
// been submitted.
void the_order_of_the_stream_holds_without_the_host(const std::vector<std::uint64_t>& counts) {
  const auto groups = pair_of_groups();
  std::array<std::thread, 2> ranks;
  for (std::size_t r = 0; r < 2; ++r) {
    ranks[r] = std::thread([&group = *groups[r], &counts, r] {
      FakeDevice device(100us);
      Stager stager(device);
      const auto user = device.make_stream();
      std::vector<float> input(100'000, static_cast<float>(r + 1)), tensor(input.size(), 50.0f);
      std::vector<float> seen(input.size(), 0.0f);
      device.stop(user);
      device.copy(user, bytes(tensor), bytes(input), input.size() * sizeof(float));
      const auto submitted = submit(group, stager, allreduce_of(tensor), counts, user);
      submitted.passage->follow(user);
      device.copy(user, bytes(seen), bytes(tensor), input.size() * sizeof(float));
      CHECK(!submitted.passage->finished());
      for (const auto& operation : submitted.operations) CHECK(!operation->done());
      device.go_on(user);
      device.synchronize(user);
      CHECK(all_equal(seen, 3.0f));
      CHECK(submitted.passage->wait(kTimeout));
      for (const auto& operation : submitted.operations) {
        CHECK(operation->wait(kTimeout));
        operation->rethrow();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

// A device that copies the second part of the input to the host only after the first part of the result is back. A call
// ends on it only if copies and reductions of different parts overlap.
class Interlocked final : public FakeDevice {
 public:
  Interlocked() : block_(Arena::of_process().allocate(sizeof(Flag))), back_(*new (block_) Flag{}) {
    pin_segment_of(block_);
  }
  ~Interlocked() override { Arena::of_process().release(block_); }
  void to_host(Stream stream, char* host, const char* device, std::size_t size) override {
    if (++copies_in_ == 2) hold(stream, back_, 1);
    FakeDevice::to_host(stream, host, device, size);
  }
  void to_device(Stream stream, char* device, const char* host, std::size_t size) override {
    FakeDevice::to_device(stream, device, host, size);
    call(stream, [](void* flag) { static_cast<Flag*>(flag)->raise(1); }, &back_);
  }

 private:
  char* block_;
  Flag& back_;
  int copies_in_ = 0;
};

void parts_are_copied_and_reduced_at_once() {
  Interlocked device;
  Stager stager(device);
  const auto group = lone_group(kTimeout);
  const auto user = device.make_stream();
  std::vector<float> tensor(3000, 7.0f);
  const auto submitted = submit(*group, stager, allreduce_of(tensor), {1024, 1024, 952}, user);
  CHECK(submitted.passage->wait(kTimeout));
  for (const auto& operation : submitted.operations) operation->rethrow();
  CHECK(all_equal(tensor, 7.0f));
  // Work that no caller waited for has run in the stream too.
  const auto history = device.history();
  const auto has = [&](const char* command) {
    return std::count_if(history.begin(), history.end(),
                         [&](const std::string& line) { return line.ends_with(command); });
  };
  CHECK(has("to_host 4096") == 2 && has("to_host 3808") == 1);
  CHECK(has("to_device 4096") == 2 && has("to_device 3808") == 1);
}

// All kinds of piece lists: input and output in different memory, no input, no output, nothing at all.
void rows_are_mirrored() {
  FakeDevice device;
  Stager stager(device);
  const auto group = lone_group(kTimeout);
  const auto user = device.make_stream();
  std::vector<float> a(10, 1.0f), b(20, 2.0f), to_a(10), to_b(20), kept(10, 5.0f);
  Request gather;
  gather.call.kind = Kind::all_to_all;
  gather.in = {{bytes(a), 40}, {bytes(b), 80}};
  gather.out = {{bytes(to_a), 40}, {bytes(to_b), 80}};
  CHECK(submit(*group, stager, gather, {}, user).passage->wait(kTimeout));
  CHECK(to_a == a && to_b == b);

  Request only_in = gather, only_out = gather, nothing = gather;
  only_in.out.clear();
  only_out.in.clear();
  only_out.out = {{bytes(to_a), 0}};
  nothing.in.clear();
  nothing.out.clear();
  for (const Request& request : {only_in, only_out, nothing}) {
    CHECK(submit(*group, stager, request, {}, user).passage->wait(kTimeout));
  }
}

void an_input_that_never_comes_ends_at_the_timeout() {
  FakeDevice device;
  Stager stager(device);
  const auto group = lone_group(0.1);
  const auto user = device.make_stream();
  std::vector<float> tensor(1000, 7.0f);
  device.stop(user);
  const auto submitted = submit(*group, stager, allreduce_of(tensor), {512, 488}, user);
  for (const auto& operation : submitted.operations) {
    CHECK(operation->wait(kTimeout));
    bool thrown = false;
    try {
      operation->rethrow();
    } catch (const Error& error) {
      thrown = error.code() == Code::rank_failed && error.rank() == 0;
    }
    CHECK(thrown);
  }
  CHECK(!submitted.passage->finished());  // the stream may still read the tensor
  device.go_on(user);
  CHECK(submitted.passage->wait(kTimeout));
  CHECK(all_nan(tensor));
}

void an_abort_ends_the_wait_for_the_device() {
  FakeDevice device;
  Stager stager(device);
  const auto group = lone_group(kTimeout);
  const auto user = device.make_stream();
  std::vector<float> tensor(1000, 7.0f), seen(1000, 0.0f);
  device.stop(user);
  const auto submitted = submit(*group, stager, allreduce_of(tensor), {}, user);
  submitted.passage->follow(user);
  device.copy(user, bytes(seen), bytes(tensor), 4000);
  group->abort();
  CHECK(submitted.operations[0]->wait(kTimeout));
  device.go_on(user);
  device.synchronize(user);  // no stream is left waiting
  CHECK(all_nan(seen));
  // In a group that is already broken, the streams continue too.
  const auto later = submit(*group, stager, allreduce_of(tensor), {}, user);
  CHECK(later.passage->wait(kTimeout));
}

void a_passage_outlives_its_group_and_stager() {
  FakeDevice device(200us);
  const auto user = device.make_stream();
  std::vector<float> tensor(1000, 7.0f);
  std::shared_ptr<Passage> passage;
  {
    const auto group = lone_group(kTimeout);
    Stager stager(device);
    passage = submit(*group, stager, allreduce_of(tensor), {}, user).passage;
  }  // the group and the stager are destroyed while the device works
  CHECK(passage->wait(kTimeout));
}

void nothing_grows() {
  FakeDevice device;
  Stager stager(device);
  const auto group = lone_group(kTimeout);
  const auto user = device.make_stream();
  std::vector<float> tensor(1 << 20, 1.0f);
  std::size_t reserved = 0, events = 0;
  for (int i = 0; i < 100; ++i) {
    const auto submitted = submit(*group, stager, allreduce_of(tensor), {1 << 19, 1 << 19}, user);
    CHECK(submitted.passage->wait(kTimeout));
    if (i == 2) {
      reserved = Arena::of_process().reserved_bytes();
      events = device.live_events();
    }
  }
  CHECK(Arena::of_process().reserved_bytes() == reserved);
  CHECK(device.live_events() <= events + 1);  // the previous call may not have given back its event yet
  CHECK(device.pinned_bytes() <= reserved);
}

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

void pinned_memory_is_not_pinned_again() {
  FakeDevice device;
  std::vector<float> mine(1000);
  CHECK(device.pin(bytes(mine), 4000));
  CHECK(!device.pin(bytes(mine), 4000));
  CHECK(device.pinned_bytes() == 4000);
  device.unpin(bytes(mine));
  CHECK(device.pinned_bytes() == 0);
}

void misuse_is_rejected() {
  FakeDevice device;
  Stager stager(device);
  const auto user = device.make_stream();
  std::vector<float> tensor(8);
  check_throws(Code::invalid, [&] { stager.stage(allreduce_of(tensor), {4, 5}, user); });
  Request two = allreduce_of(tensor);
  two.in.push_back(two.in[0]);
  check_throws(Code::invalid, [&] { stager.stage(two, {4, 4}, user); });
  check_throws(Code::invalid, [&] { device.pin_segment_of(bytes(tensor)); });
  Flag flag{};
  check_throws(Code::collective, [&] { device.hold(user, flag, 1); });
  check_throws(Code::collective, [&] { device.copy(99, nullptr, nullptr, 0); });
  device.probe(user);
  check_throws(Code::collective, [&] { device.probe(99); });
}

}  // namespace
}  // namespace ff::hfreduce

int main() {
  using namespace ff::hfreduce;
  the_order_of_the_stream_holds_without_the_host({});
  the_order_of_the_stream_holds_without_the_host({40'000, 40'000, 20'000});
  parts_are_copied_and_reduced_at_once();
  rows_are_mirrored();
  an_input_that_never_comes_ends_at_the_timeout();
  an_abort_ends_the_wait_for_the_device();
  a_passage_outlives_its_group_and_stager();
  nothing_grows();
  pinned_memory_is_not_pinned_again();
  misuse_is_rejected();
}

// A CUDA runtime for tests: device memory is plain memory, a stream is a thread. Writes down every call, in the order
// of the calls, with its arguments; fails the calls that it is told to fail.
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>

namespace {

struct Stream {
  std::deque<std::function<void()>> commands;
  bool busy = false;
  std::thread thread;
};
struct Event {
  std::uint64_t recorded = 0, reached = 0;
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::uintptr_t, Stream> streams;
  std::map<std::uintptr_t, Event> events;
  std::map<std::string, int> failing;
  std::string log;
  std::uintptr_t last = 0;
  int device = 0;
};

State& state() {
  static State* const only = new State;  // its threads run to the end of the process
  return *only;
}

using Lock = std::unique_lock<std::mutex>;

std::string number(const void* handle) { return std::to_string(reinterpret_cast<std::uintptr_t>(handle)); }

// The result of a call. REQUIRES: the mutex is held.
int called(const std::string& name, const std::string& arguments) {
  state().log += name + " " + arguments + "\n";
  const auto found = state().failing.find(name);
  return found == state().failing.end() ? 0 : found->second;
}

void work(Stream& stream) {
  State& s = state();
  Lock lock(s.mutex);
  for (;;) {
    s.changed.wait(lock, [&] { return !stream.commands.empty(); });
    const auto command = std::move(stream.commands.front());
    stream.commands.pop_front();
    stream.busy = true;
    lock.unlock();
    command();
    lock.lock();
    stream.busy = false;
    s.changed.notify_all();
  }
}

// REQUIRES: the mutex is held.
void put(void* stream, std::function<void()> command) {
  state().streams.at(reinterpret_cast<std::uintptr_t>(stream)).commands.push_back(std::move(command));
  state().changed.notify_all();
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int cudaGetDevice(int* device) {
  const Lock lock(state().mutex);
  *device = state().device;
  return 0;
}

int cudaSetDevice(int device) {
  const Lock lock(state().mutex);
  state().device = device;
  return called("cudaSetDevice", std::to_string(device));
}

int cudaStreamCreateWithFlags(void** stream, unsigned flags) {
  State& s = state();
  const Lock lock(s.mutex);
  const std::uintptr_t handle = ++s.last;
  Stream& made = s.streams[handle];
  made.thread = std::thread(work, std::ref(made));
  *stream = reinterpret_cast<void*>(handle);
  return called("cudaStreamCreateWithFlags", number(*stream) + " flags " + std::to_string(flags));
}

int cudaStreamDestroy(void* stream) {
  const Lock lock(state().mutex);
  return called("cudaStreamDestroy", number(stream));
}

int cudaEventCreateWithFlags(void** event, unsigned flags) {
  State& s = state();
  const Lock lock(s.mutex);
  s.events[++s.last] = {};
  *event = reinterpret_cast<void*>(s.last);
  return called("cudaEventCreateWithFlags", "flags " + std::to_string(flags));
}

int cudaEventDestroy(void* event) {
  const Lock lock(state().mutex);
  return called("cudaEventDestroy", number(event));
}

int cudaEventRecord(void* event, void* stream) {
  State& s = state();
  const Lock lock(s.mutex);
  Event& recorded = s.events.at(reinterpret_cast<std::uintptr_t>(event));
  put(stream, [&recorded, count = ++recorded.recorded] {
    const Lock inner(state().mutex);
    if (recorded.reached < count) recorded.reached = count;
    state().changed.notify_all();
  });
  return called("cudaEventRecord", number(event) + " on " + number(stream));
}

int cudaStreamWaitEvent(void* stream, void* event, unsigned flags) {
  State& s = state();
  const Lock lock(s.mutex);
  Event& awaited = s.events.at(reinterpret_cast<std::uintptr_t>(event));
  put(stream, [&awaited, count = awaited.recorded] {
    Lock inner(state().mutex);
    state().changed.wait(inner, [&] { return awaited.reached >= count; });
  });
  return called("cudaStreamWaitEvent",
                number(stream) + " for " + number(event) + " flags " + std::to_string(flags));
}

int cudaStreamQuery(void* stream) {
  State& s = state();
  const Lock lock(s.mutex);
  const Stream& asked = s.streams.at(reinterpret_cast<std::uintptr_t>(stream));
  const int result = called("cudaStreamQuery", number(stream));
  return result != 0 || (asked.commands.empty() && !asked.busy) ? result : 600;
}

int cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int kind, void* stream) {
  const Lock lock(state().mutex);
  const int result = called("cudaMemcpyAsync", std::to_string(bytes) + " kind " + std::to_string(kind) +
                                                   " on " + number(stream));
  if (result == 0) put(stream, [=] { std::memcpy(to, from, bytes); });
  return result;
}

int cudaLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
  const Lock lock(state().mutex);
  const int result = called("cudaLaunchHostFunc", "on " + number(stream));
  if (result == 0) put(stream, [=] { function(argument); });
  return result;
}

int cudaHostRegister(void*, std::size_t bytes, unsigned flags) {
  const Lock lock(state().mutex);
  return called("cudaHostRegister", std::to_string(bytes) + " flags " + std::to_string(flags));
}

int cudaHostUnregister(void*) {
  const Lock lock(state().mutex);
  return called("cudaHostUnregister", "");
}

// Device addresses of host memory are not host addresses here: whoever mixes them up crashes.
constexpr std::uintptr_t kDeviceBit = std::uintptr_t{1} << 62;

int cudaHostGetDevicePointer(void** device, void* host, unsigned flags) {
  const Lock lock(state().mutex);
  *device = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(host) | kDeviceBit);
  return called("cudaHostGetDevicePointer", "flags " + std::to_string(flags));
}

int cudaGetLastError() {
  const Lock lock(state().mutex);
  return called("cudaGetLastError", "");
}

const char* cudaGetErrorString(int) { return "as the stub was told"; }

int cuStreamWaitValue32_v2(void* stream, unsigned long long address, unsigned value, unsigned flags) {
  const Lock lock(state().mutex);
  const int result = called("cuStreamWaitValue32", std::to_string(value) + " flags " +
                                                       std::to_string(flags) + " on " + number(stream));
  auto* const word = reinterpret_cast<std::atomic<std::uint32_t>*>(address & ~kDeviceBit);
  if (result == 0) {
    put(stream, [=] {
      while (static_cast<std::int32_t>(word->load() - value) < 0) std::this_thread::yield();
    });
  }
  return result;
}

// For the tests.

void stub_fail(const char* name, int code) {
  const Lock lock(state().mutex);
  state().failing[name] = code;
}

const char* stub_log() {
  const Lock lock(state().mutex);
  static std::string* const copy = new std::string;
  *copy = state().log;
  return copy->c_str();
}

void stub_synchronize(void* stream) {
  State& s = state();
  Lock lock(s.mutex);
  const Stream& awaited = s.streams.at(reinterpret_cast<std::uintptr_t>(stream));
  s.changed.wait(lock, [&] { return awaited.commands.empty() && !awaited.busy; });
}

}  // extern "C"

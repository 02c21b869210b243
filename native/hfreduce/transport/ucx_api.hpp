// The part of UCX that the transport uses, loaded from libucp.so.0 at run time: the build does not need UCX.
//
// The declarations follow UCX's documentation, for the binary interface that it has kept since 1.11. Structures end
// after the last member used here, because UCX reads only what a mask names.
//
// Thread contract: api() may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ff::hfreduce::ucx {

enum class Status : signed char {
  ok = 0,
  in_progress = 1,
  message_truncated = -9,
  busy = -15,
  cancelled = -16,
  last = -100,
};

struct Context;
struct Worker;
struct Endpoint;
struct Config;
struct Address;
using Request = void;

// Functions that may not complete at once return null (done), a Request, or a Status in place of an address.
inline bool is_error(const Request* request) {
  return reinterpret_cast<std::uintptr_t>(request) >=
         static_cast<std::uintptr_t>(static_cast<std::intptr_t>(Status::last));
}
inline Status status_of(const Request* request) {
  return static_cast<Status>(reinterpret_cast<std::intptr_t>(request));
}

struct ContextParams {
  static constexpr std::uint64_t kFeatures = 1u << 0;
  static constexpr std::uint64_t kTag = 1u << 0, kWakeup = 1u << 4;
  std::uint64_t mask, features;
};

struct WorkerParams {
  static constexpr std::uint64_t kThreadMode = 1u << 0;
  static constexpr int kSerialized = 1;  // one thread at a time
  std::uint64_t mask;
  int thread_mode;
};

struct EndpointParams {
  static constexpr std::uint64_t kAddress = 1u << 0, kErrorMode = 1u << 1, kErrorHandler = 1u << 2;
  static constexpr int kPeerErrors = 1;
  std::uint64_t mask;
  const Address* address;
  int error_mode;
  void (*on_error)(void* argument, Endpoint* endpoint, Status status);
  void* argument;
};

struct Received {
  std::uint64_t tag;
  std::size_t bytes;
};

using SendCallback = void (*)(Request* request, Status status, void* argument);
using ReceiveCallback = void (*)(Request* request, Status status, const Received* received, void* argument);

struct CallParams {
  static constexpr std::uint32_t kCallback = 1u << 1, kArgument = 1u << 2, kFlags = 1u << 4, kMemoryType = 1u << 6,
                                 kNeverAtOnce = 1u << 16;  // the callback reports every completion
  static constexpr std::uint32_t kForce = 1u << 0;         // flag of endpoint_close
  static constexpr int kHost = 0;                          // memory_type
  std::uint32_t mask, flags;
  Request* request;
  union {
    SendCallback sent;
    ReceiveCallback received;
  };
  std::uint64_t datatype;
  void* argument;
  void* reply_buffer;
  int memory_type;
  void* received_info;
  void* memory_handle;
};

struct Api {
  unsigned major, minor;
  void (*get_version)(unsigned* major, unsigned* minor, unsigned* release);
  Status (*config_read)(const char* prefix, const char* file, Config** config);
  void (*config_release)(Config* config);
  Status (*init)(unsigned major, unsigned minor, const ContextParams* params, const Config* config, Context** context);
  void (*cleanup)(Context* context);
  Status (*worker_create)(Context* context, const WorkerParams* params, Worker** worker);
  void (*worker_destroy)(Worker* worker);
  Status (*worker_get_address)(Worker* worker, Address** address, std::size_t* bytes);
  void (*worker_release_address)(Worker* worker, Address* address);
  Status (*worker_get_efd)(Worker* worker, int* fd);
  Status (*worker_arm)(Worker* worker);
  unsigned (*worker_progress)(Worker* worker);
  Request* (*worker_flush)(Worker* worker, const CallParams* params);
  Status (*endpoint_create)(Worker* worker, const EndpointParams* params, Endpoint** endpoint);
  Request* (*endpoint_close)(Endpoint* endpoint, const CallParams* params);
  Request* (*tag_send)(Endpoint* endpoint, const void* data, std::size_t bytes, std::uint64_t tag,
                       const CallParams* params);
  Request* (*tag_receive)(Worker* worker, void* data, std::size_t bytes, std::uint64_t tag, std::uint64_t tag_mask,
                          const CallParams* params);
  void (*request_cancel)(Worker* worker, Request* request);
  void (*request_free)(Request* request);
  Status (*request_status)(Request* request);
  const char* (*status_string)(Status status);
};

// Loads the library at the first call; it stays loaded. If it is missing or too old, throws Error(collective), which
// names the package to install.
//
// By default UCX would take over signals (such as SIGSEGV and SIGHUP), write its log to the standard output, and
// rewrite mmap and similar functions in the C library. This function prevents that unless variables of UCX ask for it.
// With RDMA devices the rewriting stays, because their registration cache would not be safe without it.
const Api& api();

}  // namespace ff::hfreduce::ucx

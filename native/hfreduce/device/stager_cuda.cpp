#include "hfreduce/device/stager_cuda.hpp"

#include <dlfcn.h>

#include <cstdlib>

namespace ff::hfreduce {
namespace {

// From cuda_runtime_api.h and cuda.h; these values have never changed.
constexpr int kSuccess = 0;
constexpr int kNotReady = 600;                       // cudaErrorNotReady
constexpr int kAlreadyRegistered = 712;              // cudaErrorHostMemoryAlreadyRegistered
constexpr unsigned kNonBlocking = 1;                 // cudaStreamNonBlocking: no implicit order with stream 0
constexpr unsigned kDisableTiming = 2;               // cudaEventDisableTiming
constexpr unsigned kPortableMapped = 1 | 2;          // cudaHostRegisterPortable | cudaHostRegisterMapped
constexpr int kHostToDevice = 1, kDeviceToHost = 2;  // cudaMemcpyKind
constexpr unsigned kWaitGreaterOrEqual = 0;          // CU_STREAM_WAIT_VALUE_GEQ: (int32_t)(*address - value) >= 0

void* open_library(const char* variable, std::initializer_list<const char*> names) {
  if (const char* path = std::getenv(variable); path != nullptr && *path != '\0') {
    if (void* library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL)) return library;
    throw Error(Code::collective, std::string(variable) + ": " + ::dlerror());
  }
  // Prefers a library that is already loaded, because only that library has the process's CUDA contexts.
  for (const int flags : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL}) {
    for (const char* name : names) {
      if (void* library = ::dlopen(name, flags)) return library;
    }
  }
  const char* why = ::dlerror();
  throw Error(Code::collective, std::string("tensors on CUDA devices need ") + *names.begin() + ": " +
                                    (why != nullptr ? why : "not found") + "; set " + variable +
                                    " to the library's path");
}

template <typename Function>
void find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(::dlsym(library, name));
  if (function == nullptr) {
    throw Error(Code::collective, std::string("the CUDA library has no ") + name + ": too old, or not CUDA");
  }
}

void* pointer(std::uintptr_t handle) { return reinterpret_cast<void*>(handle); }

}  // namespace

struct CudaDevice::Runtime {
  int (*get_device)(int*);
  int (*set_device)(int);
  int (*stream_create)(void**, unsigned);
  int (*stream_destroy)(void*);
  int (*event_create)(void**, unsigned);
  int (*event_destroy)(void*);
  int (*event_record)(void*, void*);
  int (*stream_wait_event)(void*, void*, unsigned);
  int (*stream_query)(void*);
  int (*memcpy_async)(void*, const void*, std::size_t, int, void*);
  int (*launch_host_function)(void*, void (*)(void*), void*);
  int (*host_register)(void*, std::size_t, unsigned);
  int (*host_unregister)(void*);
  int (*host_get_device_pointer)(void**, void*, unsigned);
  int (*get_last_error)();
  const char* (*get_error_string)(int);
  int (*stream_wait_value)(void*, unsigned long long, unsigned, unsigned);
};

// Loads the libraries once; they stay loaded. If that fails, the next device tries again.
const CudaDevice::Runtime& CudaDevice::runtime() {
  static const Runtime loaded = [] {
    Runtime r{};
    void* cudart = open_library("FIREFLYER_CUDART", {"libcudart.so.13", "libcudart.so.12", "libcudart.so"});
    find(cudart, "cudaGetDevice", r.get_device);
    find(cudart, "cudaSetDevice", r.set_device);
    find(cudart, "cudaStreamCreateWithFlags", r.stream_create);
    find(cudart, "cudaStreamDestroy", r.stream_destroy);
    find(cudart, "cudaEventCreateWithFlags", r.event_create);
    find(cudart, "cudaEventDestroy", r.event_destroy);
    find(cudart, "cudaEventRecord", r.event_record);
    find(cudart, "cudaStreamWaitEvent", r.stream_wait_event);
    find(cudart, "cudaStreamQuery", r.stream_query);
    find(cudart, "cudaMemcpyAsync", r.memcpy_async);
    find(cudart, "cudaLaunchHostFunc", r.launch_host_function);
    find(cudart, "cudaHostRegister", r.host_register);
    find(cudart, "cudaHostUnregister", r.host_unregister);
    find(cudart, "cudaHostGetDevicePointer", r.host_get_device_pointer);
    find(cudart, "cudaGetLastError", r.get_last_error);
    find(cudart, "cudaGetErrorString", r.get_error_string);
    void* driver = open_library("FIREFLYER_CUDA", {"libcuda.so.1"});
    find(driver, "cuStreamWaitValue32_v2", r.stream_wait_value);
    return r;
  }();
  return loaded;
}

void CudaDevice::check(int result, const char* function) const {
  if (result == kSuccess) return;
  cuda_.get_last_error();  // clears our error, so that no other code finds it
  throw Error(Code::collective, std::string(function) + " on CUDA device " + std::to_string(index_) + ": " +
                                    cuda_.get_error_string(result) + " (" + std::to_string(result) + ")");
}

class CudaDevice::Current {
 public:
  explicit Current(const CudaDevice& device) : device_(device) {
    device.check(device.cuda_.get_device(&before_), "cudaGetDevice");
    if (before_ != device.index_) device.check(device.cuda_.set_device(device.index_), "cudaSetDevice");
  }
  ~Current() {
    if (before_ != device_.index_) device_.cuda_.set_device(before_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const CudaDevice& device_;
  int before_ = 0;
};

CudaDevice::CudaDevice(int index) : cuda_(runtime()), index_(index) { const Current current(*this); }

CudaDevice::~CudaDevice() { close(); }

Device::Stream CudaDevice::make_stream() {
  const Current current(*this);
  void* stream = nullptr;
  check(cuda_.stream_create(&stream, kNonBlocking), "cudaStreamCreateWithFlags");
  return reinterpret_cast<Stream>(stream);
}

void CudaDevice::drop_stream(Stream stream) noexcept { cuda_.stream_destroy(pointer(stream)); }

Device::Event CudaDevice::make_event() {
  const Current current(*this);
  void* event = nullptr;
  check(cuda_.event_create(&event, kDisableTiming), "cudaEventCreateWithFlags");
  return reinterpret_cast<Event>(event);
}

void CudaDevice::drop_event(Event event) noexcept { cuda_.event_destroy(pointer(event)); }

void CudaDevice::record(Event event, Stream stream) {
  const Current current(*this);
  check(cuda_.event_record(pointer(event), pointer(stream)), "cudaEventRecord");
}

void CudaDevice::wait(Stream stream, Event event) {
  const Current current(*this);
  check(cuda_.stream_wait_event(pointer(stream), pointer(event), 0), "cudaStreamWaitEvent");
}

void CudaDevice::to_host(Stream stream, char* host, const char* device, std::size_t bytes) {
  const Current current(*this);
  check(cuda_.memcpy_async(host, device, bytes, kDeviceToHost, pointer(stream)), "cudaMemcpyAsync");
}

void CudaDevice::to_device(Stream stream, char* device, const char* host, std::size_t bytes) {
  const Current current(*this);
  check(cuda_.memcpy_async(device, host, bytes, kHostToDevice, pointer(stream)), "cudaMemcpyAsync");
}

void CudaDevice::call(Stream stream, void (*function)(void*), void* argument) {
  const Current current(*this);
  check(cuda_.launch_host_function(pointer(stream), function, argument), "cudaLaunchHostFunc");
}

void CudaDevice::hold(Stream stream, Flag& gate, std::uint32_t target) {
  const Current current(*this);
  void* address = nullptr;
  check(cuda_.host_get_device_pointer(&address, &gate.value, 0), "cudaHostGetDevicePointer");
  const int result =
      cuda_.stream_wait_value(pointer(stream), reinterpret_cast<std::uintptr_t>(address), target, kWaitGreaterOrEqual);
  if (result == kSuccess) return;
  throw Error(Code::collective, "cuStreamWaitValue32 on CUDA device " + std::to_string(index_) + " gave error " +
                                    std::to_string(result) + " of the driver (801: not supported on this system)");
}

void CudaDevice::probe(Stream stream) {
  const Current current(*this);
  const int result = cuda_.stream_query(pointer(stream));
  if (result == kNotReady) {
    cuda_.get_last_error();
  } else {
    check(result, "cudaStreamQuery");
  }
}

bool CudaDevice::pin(char* data, std::size_t bytes) {
  const Current current(*this);
  const int result = cuda_.host_register(data, bytes, kPortableMapped);
  if (result == kAlreadyRegistered) {
    cuda_.get_last_error();
    return false;
  }
  check(result, "cudaHostRegister");
  return true;
}

void CudaDevice::unpin(char* data) noexcept { cuda_.host_unregister(data); }

}  // namespace ff::hfreduce

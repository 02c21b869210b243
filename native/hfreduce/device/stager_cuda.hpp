// A CUDA device, used through libcudart and one function of libcuda. The first device loads both libraries.
//
// FIREFLYER_CUDART and FIREFLYER_CUDA name the libraries. Otherwise the device uses the runtime that the process has
// already loaded (torch's), or else libcudart.so.13 or .12, and libcuda.so.1. Nothing is compiled or linked against CUDA.
#pragma once

#include "hfreduce/device/stager.hpp"

namespace ff::hfreduce {

class CudaDevice final : public Device {
 public:
  // Throws Code::collective if a library or one of its functions is missing.
  explicit CudaDevice(int index);
  ~CudaDevice() override;

  Stream make_stream() override;
  void drop_stream(Stream stream) noexcept override;
  void record(Event event, Stream stream) override;
  void wait(Stream stream, Event event) override;
  void to_host(Stream stream, char* host, const char* device, std::size_t bytes) override;
  void to_device(Stream stream, char* device, const char* host, std::size_t bytes) override;
  void call(Stream stream, void (*function)(void*), void* argument) override;
  void hold(Stream stream, Flag& gate, std::uint32_t target) override;
  void probe(Stream stream) override;
  bool pin(char* data, std::size_t bytes) override;
  void unpin(char* data) noexcept override;

 protected:
  Event make_event() override;
  void drop_event(Event event) noexcept override;

 private:
  struct Runtime;
  class Current;  // makes this device the calling thread's current one

  static const Runtime& runtime();
  void check(int result, const char* function) const;

  const Runtime& cuda_;
  const int index_;
};

}  // namespace ff::hfreduce

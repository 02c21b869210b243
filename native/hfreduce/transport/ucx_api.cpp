#include "hfreduce/transport/ucx_api.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "base/error.hpp"

namespace ff::hfreduce::ucx {
namespace {

constexpr const char* kLibrary = "libucp.so.0";
constexpr const char* kPackage = "libucx0 (Debian, Ubuntu) or ucx (Red Hat, SUSE)";
constexpr unsigned kMajor = 1, kMinor = 11;  // all versions 1.x from 1.11 on are compatible

// Variables that are set while the library loads, unless the user has set them. Changes of the environment are not safe
// while other threads read it, so this runs once per process: when its first group over UCX is made.
class Setting {
 public:
  Setting() {
    set("UCX_HANDLE_ERRORS", "none");
    set("UCX_ERROR_SIGNALS", "");
    set("UCX_DEBUG_SIGNO", "0");
    set("UCX_LOG_FILE", "/dev/stderr");
    if (::access("/sys/class/infiniband", F_OK) != 0) set("UCX_MEM_EVENTS", "no");
  }
  ~Setting() {
    for (const char* name : set_) ::unsetenv(name);
  }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

 private:
  void set(const char* name, const char* value) {
    if (std::getenv(name) != nullptr || ::setenv(name, value, 0) != 0) return;
    set_.push_back(name);
  }

  std::vector<const char*> set_;
};

template <typename Function>
void find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(::dlsym(library, name));
  if (function == nullptr) {
    throw Error(Code::collective, std::string(kLibrary) + " has no " + name + ": not UCX 1.11 or newer");
  }
}

Api load() {
  const Setting setting;
  void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Error(Code::collective, std::string("the UCX transport needs ") + kLibrary + ": " + ::dlerror() +
                                      "; install the package " + kPackage);
  }
  Api a{};
  find(library, "ucp_get_version", a.get_version);
  unsigned release = 0;
  a.get_version(&a.major, &a.minor, &release);
  if (a.major != kMajor || a.minor < kMinor) {
    throw Error(Code::collective, std::string(kLibrary) + " is of UCX " + std::to_string(a.major) + "." +
                                      std::to_string(a.minor) + ": 1.11 or a newer 1.x is needed; package " + kPackage);
  }
  find(library, "ucp_config_read", a.config_read);
  find(library, "ucp_config_release", a.config_release);
  find(library, "ucp_init_version", a.init);
  find(library, "ucp_cleanup", a.cleanup);
  find(library, "ucp_worker_create", a.worker_create);
  find(library, "ucp_worker_destroy", a.worker_destroy);
  find(library, "ucp_worker_get_address", a.worker_get_address);
  find(library, "ucp_worker_release_address", a.worker_release_address);
  find(library, "ucp_worker_get_efd", a.worker_get_efd);
  find(library, "ucp_worker_arm", a.worker_arm);
  find(library, "ucp_worker_progress", a.worker_progress);
  find(library, "ucp_worker_flush_nbx", a.worker_flush);
  find(library, "ucp_ep_create", a.endpoint_create);
  find(library, "ucp_ep_close_nbx", a.endpoint_close);
  find(library, "ucp_tag_send_nbx", a.tag_send);
  find(library, "ucp_tag_recv_nbx", a.tag_receive);
  find(library, "ucp_request_cancel", a.request_cancel);
  find(library, "ucp_request_free", a.request_free);
  find(library, "ucp_request_check_status", a.request_status);
  find(library, "ucs_status_string", a.status_string);
  return a;
}

}  // namespace

// After a failure the next call tries again.
const Api& api() {
  static const Api loaded = load();
  return loaded;
}

}  // namespace ff::hfreduce::ucx

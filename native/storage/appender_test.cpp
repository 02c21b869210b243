// A file equals the appended bytes, for all lengths, alignments, queues and queue faults. Errors have the errno of the
// failed request. No request is in flight after the appender's destruction.
#include "storage/appender.hpp"

#include <sys/mman.h>
#include <sys/resource.h>

#include <csignal>
#include <cstring>
#include <system_error>

#include "base/io/thread_queue.hpp"
#include "base/testing/check.hpp"
#include "storage/scenes.hpp"

namespace {

using ff::storage::Appender;
using ff::storage::MakeQueue;
using ff::storage::TemporaryFile;

// Page-aligned memory.
class Pages {
 public:
  explicit Pages(std::size_t size) : size_(size) {
    void* const at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    at_ = static_cast<char*>(at);
    const auto bytes = ff::storage::random_bytes(size, 5);
    std::memcpy(at_, bytes.data(), size);
  }
  ~Pages() { ::munmap(at_, size_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  const char* data() const { return at_; }

 private:
  std::size_t size_;
  char* at_;
};

std::unique_ptr<ff::IoQueue> threads(unsigned entries) { return ff::thread_queue::make(entries, 3); }
std::unique_ptr<ff::IoQueue> rough(unsigned entries) {
  return std::make_unique<ff::storage::RoughQueue>(entries, 0, 0);
}
std::unique_ptr<ff::IoQueue> refusing(unsigned entries) {
  return std::make_unique<ff::storage::RoughQueue>(entries, 3, EINVAL);
}

const std::vector<MakeQueue> kQueues = {ff::storage::make_queue, threads, rough, refusing};

void tails(const Pages& pages) {
  constexpr std::size_t kWhole = std::size_t{1} << 20;
  for (const MakeQueue& make : kQueues) {
    for (const std::size_t tail : {0, 1, 511, 512, 4095, 4096, 4097, 8191, 8192, 8193}) {
      const TemporaryFile file;
      Appender appender(file.fd(), 0, make);
      appender.append(pages.data(), kWhole);
      appender.append(pages.data() + kWhole, tail);
      appender.finish();
      const auto found = file.bytes();
      CHECK(found.size() == kWhole + tail && std::memcmp(found.data(), pages.data(), found.size()) == 0);
    }
  }
}

// Chunks of any length from memory at any address; the size is unknown (0), too small or too large.
void chunks(const Pages& pages, const std::string& directory) {
  unsigned seed = 0;
  for (const MakeQueue& make : kQueues) {
    for (const std::uint64_t size : {0, 5000, 20 << 20}) {
      const TemporaryFile file(directory);
      std::vector<char> wanted;
      std::mt19937 random(++seed);
      Appender appender(file.fd(), size, make);
      while (wanted.size() < std::size_t{FF_THREAD_SANITIZER ? 5 : 14} << 20) {
        const std::size_t bytes = random() % 2 == 0 ? random() % 5000 : (random() % 600) * 4096;
        const char* const from = pages.data() + (random() % 2 == 0 ? random() % 9000 : random() % 3 * 4096);
        appender.append(from, bytes);
        wanted.insert(wanted.end(), from, from + bytes);
        CHECK(appender.settled() <= wanted.size());
      }
      appender.finish();
      CHECK(file.bytes() == wanted);
    }
  }
}

void small() {
  for (const std::size_t size : {0, 1, 4096, 5000}) {
    const TemporaryFile file;
    const auto bytes = ff::storage::random_bytes(size, 1);
    Appender appender(file.fd());
    appender.append(bytes.data(), size);
    appender.finish();
    CHECK(file.bytes() == bytes);
  }
}

// Returns the errno that ends appending, 0 without an error.
int error_of(const Pages& pages, const MakeQueue& make, std::uint64_t size) {
  const TemporaryFile file;
  try {
    Appender appender(file.fd(), size, make);
    for (int i = 0; i < 8; ++i) appender.append(pages.data(), std::size_t{2} << 20);
    appender.finish();
  } catch (const std::system_error& error) {
    return error.code().value();
  }
  return 0;
}

void errors(const Pages& pages) {
  for (const int error : {ENOSPC, EIO, EDQUOT}) {
    for (const int from : {0, 1, 5, 15}) {
      const auto make = [&](unsigned entries) {
        return std::make_unique<ff::storage::RoughQueue>(entries, from, error);
      };
      CHECK(error_of(pages, make, 0) == error);
    }
  }
  // A limit on the file's length is detected with a known and an unknown size.
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  CHECK(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  const rlimit low{std::size_t{9} << 20, before.rlim_max};
  CHECK(::setrlimit(RLIMIT_FSIZE, &low) == 0);
  for (const std::uint64_t size : {0, 16 << 20}) CHECK(error_of(pages, ff::storage::make_queue, size) == EFBIG);
  CHECK(::setrlimit(RLIMIT_FSIZE, &before) == 0);
}

void abandoned(const Pages& pages) {
  for (const MakeQueue& make : kQueues) {
    const TemporaryFile file;
    Appender appender(file.fd(), 0, make);
    appender.append(pages.data(), std::size_t{4} << 20);
    appender.append(pages.data() + 1, 100000);
  }
}

}  // namespace

int main() {
  const Pages pages(std::size_t{4} << 20);
  small();
  tails(pages);
  chunks(pages, "/var/tmp");
  chunks(pages, "/dev/shm");  // without a disk
  errors(pages);
  abandoned(pages);
  return 0;
}

// The reader's kernel calls: their number and their byte ranges.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <random>

#include "base/testing/check.hpp"
#include "base/testing/one_thread.hpp"
#include "ffrecord/format/v2_encode.hpp"
#include "ffrecord/read/reader.hpp"

namespace {

using namespace ff::ffrecord;
using testing::Bytes;
using Range = std::pair<std::int64_t, std::int64_t>;  // place, bytes

// A reader's calls, with counters.
struct Counted {
  std::atomic<int> reads = 0, looks = 0;
  std::atomic<bool> slow = false;  // every touched page has to wait for the disk
  std::atomic<long> waits = 0;
  std::mutex mutex;
  std::vector<Range> wished;

  Calls calls();
};

Calls Counted::calls() {
  Calls calls = kernel();
  calls.preadv2 = [this](int fd, const iovec* parts, int count, std::int64_t offset, int) -> long {
    ++reads;
    return ::preadv(fd, parts, count, offset);
  };
  calls.mincore = [this](const void*, std::size_t bytes, unsigned char* present) {
    ++looks;
    std::memset(present, 1, (bytes + 4095) / 4096);
    return 0;
  };
  calls.will_need = [this](int, std::int64_t offset, std::int64_t bytes) {
    const std::scoped_lock lock(mutex);
    wished.emplace_back(offset, bytes);
  };
  calls.waits = [this] { return slow ? ++waits : waits.load(); };
  return calls;
}

// A record file with samples of the given sizes, and a batch of every second sample.
struct File {
  std::string path;
  std::vector<Bytes> samples;
  std::vector<std::int64_t> wanted;

  File(const std::vector<std::size_t>& sizes, int version)
      : path("/tmp/fireflyer-calls-test-" + std::to_string(::getpid())) {
    std::mt19937 random(5);
    for (const std::size_t size : sizes) {
      samples.emplace_back(size);
      for (auto& byte : samples.back()) byte = static_cast<unsigned char>(random());
    }
    for (std::size_t i = 0; i < sizes.size(); i += 2) wanted.push_back(static_cast<std::int64_t>(i));
    const Bytes bytes = version == 2 ? testing::encode_v2({samples}) : testing::encode_v1(samples);
    std::FILE* const out = std::fopen(path.c_str(), "wb");
    CHECK(out != nullptr && std::fwrite(bytes.data(), 1, bytes.size(), out) == bytes.size());
    CHECK(std::fclose(out) == 0);
  }
  ~File() { ::unlink(path.c_str()); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  void read(const Reader& reader) const {
    const Batch batch = reader.read(wanted.data(), wanted.size());
    for (std::size_t j = 0; j < wanted.size(); ++j) {
      const Bytes& sample = samples[static_cast<std::size_t>(wanted[j])];
      CHECK(batch.offsets[j + 1] - batch.offsets[j] == static_cast<std::int64_t>(sample.size()));
      CHECK(std::equal(sample.begin(), sample.end(), batch.arena.data() + batch.offsets[j]));
    }
  }
};

// After a batch of many small samples was found in the page cache, the next batches copy from the mapping, without
// system calls. After a page fault that waited for the disk, a batch checks the page cache again.
void small_samples() {
  const File file(std::vector<std::size_t>(400, 1000), 1);
  for (const unsigned threads : {1u, 3u}) {
    Counted counted;
    const Calls calls = counted.calls();
    const Reader reader({file.path}, {.threads = threads}, calls);
    file.read(reader);
    CHECK(counted.reads == 200);
    for (int round = 0; round < 3; ++round) file.read(reader);
    CHECK(counted.reads == 200 && counted.looks == 0);
    counted.slow = true;
    file.read(reader);
    const int rest = counted.reads - 200;
    CHECK(rest > 0 && rest < 200 && counted.looks == rest);
    counted.slow = false;
    file.read(reader);
    CHECK(counted.reads == 400 + rest && counted.looks == 200 + rest);
    file.read(reader);
    CHECK(counted.reads == 400 + rest);
  }
}

// Large samples, few samples and the strategy `cached` never touch the mapping.
void others_are_read() {
  for (const auto& [count, size, strategy] :
       {std::tuple{400, 5000, Strategy::automatic}, {40, 1000, Strategy::automatic}, {400, 1000, Strategy::cached}}) {
    const File file(std::vector<std::size_t>(static_cast<std::size_t>(count), static_cast<std::size_t>(size)), 1);
    Counted counted;
    const Calls calls = counted.calls();
    const Reader reader({file.path}, {.strategy = strategy}, calls);
    for (int round = 0; round < 3; ++round) file.read(reader);
    CHECK(counted.reads == 3 * count / 2);
  }
}

// A file on a network file system is read, not mapped, because the pages of a mapping may vanish forever.
void a_network_file_is_read() {
  const File file(std::vector<std::size_t>(400, 1000), 1);
  Counted counted;
  Calls calls = counted.calls();
  calls.fstatfs = [](int, struct statfs* found) {
    found->f_type = 0x6969;
    return 0;
  };
  const Reader reader({file.path}, {}, calls);
  for (int round = 0; round < 3; ++round) file.read(reader);
  CHECK(counted.reads == 3 * 200);
}

// All index pages that a batch is the first to touch are requested before the batch waits for one of them.
void index_pages() {
  const File file(std::vector<std::size_t>(1000, 8), 2);
  Counted counted;
  const Calls calls = counted.calls();
  const Reader reader({file.path}, {}, calls);
  const std::int64_t start = dynamic_cast<const V2File&>(*reader.files()[0]).index().runs()[0].place;
  const std::int64_t wanted[] = {900, 0, 130, 131, 300, 901};
  for (int round = 0; round < 2; ++round) {
    reader.read(wanted, std::size(wanted));
    CHECK((counted.wished == std::vector<Range>{{start, 3 * kPage}, {start + 7 * kPage, kPage}}));
  }
  reader.read(file.wanted.data(), file.wanted.size());
  CHECK(counted.wished.size() == 3 && counted.wished[2] == Range(start + 3 * kPage, 4 * kPage));
}

}  // namespace

int main() {
  small_samples();
  others_are_read();
  a_network_file_is_read();
  index_pages();
  return 0;
}

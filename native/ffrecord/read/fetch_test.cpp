// Every strategy gives the same bytes under all faults: short reads, interruptions, pages not in the cache, files and
// kernels that refuse a method. Errors are typed, and leave no read behind.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>

#include "base/crc/crc32.hpp"
#include "base/error.hpp"
#include "base/testing/check.hpp"
#include "base/testing/test_bytes.hpp"
#include "ffrecord/read/reader.hpp"

namespace {

using namespace ff::ffrecord;
using Bytes = std::vector<unsigned char>;

const Strategy kAll[] = {Strategy::automatic, Strategy::cached, Strategy::direct, Strategy::threads, Strategy::mmap};

// Behaviour of a test's kernel.
struct Weather {
  bool rough = false;       // interruptions, short results, pages not in the cache
  bool lies = false;        // reports all pages as cached
  bool no_nowait = false;   // RWF_NOWAIT is not supported
  bool no_queue = false;    // io_uring is forbidden
  int open_error = 0;       // O_DIRECT is refused at open
  std::int64_t result = 0;  // returned by every direct read, if not 0
};

std::atomic<int> direct_reads = 0;

// A queue that reads on demand, and gives the results in any order.
class FakeQueue final : public ff::IoQueue {
 public:
  explicit FakeQueue(const Weather& weather) : weather_(weather) {}
  ~FakeQueue() override { CHECK(reads_.empty()); }
  unsigned capacity() const override { return 16; }
  bool own() const override { return true; }
  void read(int fd, void* to, std::size_t bytes, std::int64_t offset, std::uint64_t tag) override {
    CHECK(bytes % 4096 == 0 && offset % 4096 == 0 && reinterpret_cast<std::uintptr_t>(to) % 4096 == 0);
    CHECK(bytes <= static_cast<std::size_t>(DirectQueue::kSlot) && reads_.size() < capacity());
    reads_.push_back({fd, to, bytes, offset, tag});
    ++direct_reads;
  }
  void write(int, const void*, std::size_t, std::int64_t, std::uint64_t) override { CHECK(false); }
  void submit(unsigned wanted) override { CHECK(wanted <= reads_.size()); }
  bool take(ff::IoResult& result) override {
    if (reads_.empty()) return false;
    const std::size_t which = random_() % reads_.size();
    const Read read = reads_[which];
    reads_.erase(reads_.begin() + static_cast<std::ptrdiff_t>(which));
    result = {read.tag, weather_.result};
    if (weather_.result != 0) return true;
    const unsigned mood = weather_.rough ? random_() % 4 : 3;
    if (mood == 0) result.bytes = -EINTR;
    if (mood == 1) result.bytes = -EAGAIN;
    if (mood < 2) return true;
    result.bytes = ::pread(read.fd, read.to, read.bytes, read.offset);
    CHECK(result.bytes >= 0);
    if (mood == 2 && result.bytes > 4096)
      result.bytes = 4096 + static_cast<std::int64_t>(random_()) % (result.bytes - 4096);
    return true;
  }

 private:
  struct Read {
    int fd;
    void* to;
    std::size_t bytes;
    std::int64_t offset;
    std::uint64_t tag;
  };
  const Weather weather_;
  std::vector<Read> reads_;
  std::minstd_rand random_;
};

Calls calls_in(const Weather& weather) {
  Calls calls = kernel();
  calls.preadv2 = [weather](int fd, const iovec* parts, int count, std::int64_t offset, int flags) -> long {
    thread_local std::minstd_rand random;
    if (flags != 0 && weather.no_nowait) return -EOPNOTSUPP;
    if (!weather.rough) return kernel().preadv2(fd, parts, count, offset, 0);
    const unsigned mood = random() % 4;
    if (mood == 0) return -EINTR;
    if (mood == 1 && flags != 0) return -EAGAIN;
    iovec one = parts[0];
    if (mood == 2 && one.iov_len > 1) one.iov_len = 1 + random() % (one.iov_len - 1);
    return mood == 2 ? ::preadv(fd, &one, 1, offset) : ::preadv(fd, parts, count, offset);
  };
  calls.open_direct = [weather](int fd) { return weather.open_error != 0 ? -weather.open_error : ::dup(fd); };
  calls.queue = [weather](unsigned) -> std::unique_ptr<ff::IoQueue> {
    if (weather.no_queue) return nullptr;
    return std::make_unique<FakeQueue>(weather);
  };
  calls.mincore = [weather](const void* start, std::size_t bytes, unsigned char* present) {
    thread_local std::minstd_rand random;
    if (!weather.rough) return kernel().mincore(start, bytes, present);
    std::memset(present, weather.lies || random() % 2 == 0 ? 1 : 0, (bytes + 4095) / 4096);
    return 0;
  };
  return calls;
}

template <typename T>
void append(Bytes& bytes, const T& value) {
  const std::size_t end = bytes.size();
  bytes.resize(end + sizeof value);
  std::memcpy(bytes.data() + end, &value, sizeof value);
}

std::string store(const std::vector<Bytes>& samples, const std::string& name) {
  const auto n = static_cast<std::int64_t>(samples.size());
  Bytes file(4);  // the checksum
  append(file, n);
  for (const Bytes& sample : samples) append(file, ff::crc32(0, sample.data(), sample.size()));
  std::int64_t offset = 12 + 12 * n;
  for (const Bytes& sample : samples) {
    append(file, offset);
    offset += static_cast<std::int64_t>(sample.size());
  }
  const std::uint32_t sum = ff::crc32(0, file.data() + 4, file.size() - 4);
  std::memcpy(file.data(), &sum, 4);
  for (const Bytes& sample : samples) file.insert(file.end(), sample.begin(), sample.end());
  const std::string path = "/tmp/fireflyer-fetch-test-" + std::to_string(::getpid()) + name;
  std::FILE* const out = std::fopen(path.c_str(), "wb");
  CHECK(out != nullptr && std::fwrite(file.data(), 1, file.size(), out) == file.size());
  CHECK(std::fclose(out) == 0);
  return path;
}

// Samples of all kinds in two files: empty, small neighbours, some longer than a slot and than a run.
struct Data {
  std::vector<Bytes> samples;
  std::vector<std::string> paths;

  Data() {
    std::mt19937 random(3);
    for (int i = 0; i < 300; ++i) {
      const std::size_t sizes[] = {0, 1 + random() % 50, 1000 + random() % 5000, 30'000 + random() % 60'000};
      samples.emplace_back(i == 17 ? 300'000 : i == 211 ? 1'500'001 : sizes[random() % 4]);
      ff::fill_random(samples.back().data(), samples.back().size(), random());
    }
    paths = {store({samples.begin(), samples.begin() + 120}, "-a.ffr"),
             store({samples.begin() + 120, samples.end()}, "-b.ffr")};
  }
  ~Data() {
    for (const auto& path : paths) ::unlink(path.c_str());
  }
  Data(const Data&) = delete;
  Data& operator=(const Data&) = delete;
};

void check_batch(const Reader& reader, const Data& data, std::mt19937& random, std::size_t count) {
  std::vector<std::int64_t> wanted(count);
  for (auto& index : wanted) index = static_cast<std::int64_t>(random() % data.samples.size());
  if (count > 3) wanted[0] = 211, wanted[1] = 17, wanted[2] = 17;
  const Batch batch = reader.read(wanted.data(), count);
  for (std::size_t j = 0; j < count; ++j) {
    const Bytes& sample = data.samples[static_cast<std::size_t>(wanted[j])];
    CHECK(batch.offsets[j + 1] - batch.offsets[j] == static_cast<std::int64_t>(sample.size()));
    CHECK(std::equal(sample.begin(), sample.end(), batch.arena.data() + batch.offsets[j]));
  }
}

void same_bytes(const Data& data) {
  std::mt19937 random(1);
  for (const Weather& weather : {Weather{}, Weather{.rough = true}, Weather{.rough = true, .no_nowait = true}}) {
    for (const Strategy strategy : kAll) {
      for (const unsigned threads : {0u, 1u, 3u}) {
        const Reader reader(data.paths, {.strategy = strategy, .threads = threads}, calls_in(weather));
        for (const std::size_t count : {0, 1, 5, 40, 200}) check_batch(reader, data, random, count);
      }
    }
  }
}

ff::Code code_of(const Reader& reader, const std::vector<std::int64_t>& wanted, const std::string& words) {
  try {
    reader.read(wanted.data(), wanted.size());
  } catch (const ff::Error& error) {
    CHECK(std::string(error.what()).find(words) != std::string::npos);
    return error.code();
  }
  std::fprintf(stderr, "no error '%s'\n", words.c_str());
  std::abort();
}

std::vector<std::int64_t> all(const Data& data) {
  std::vector<std::int64_t> indices(data.samples.size());
  for (std::size_t i = 0; i < indices.size(); ++i) indices[i] = static_cast<std::int64_t>(i);
  return indices;
}

// If a method is refused, the strategy `automatic` uses another method, and `direct` reports the refusal.
void barred(const Data& data) {
  std::mt19937 random(2);
  for (const Weather& weather : {Weather{.rough = true, .no_queue = true}, Weather{.rough = true, .open_error = EINVAL},
                                 Weather{.rough = true, .result = -EINVAL}}) {
    const Calls calls = calls_in(weather);
    const Reader reader(data.paths, {}, calls);
    for (int round = 0; round < 5; ++round) check_batch(reader, data, random, 100);
    const Reader direct(data.paths, {.strategy = Strategy::direct}, calls);
    CHECK(code_of(direct, all(data), "past the page cache") == ff::Code::storage);
  }
  // A refused method is not tried again. If the kernel does not tell what is cached, all is read into the cache.
  for (const Weather& weather : {Weather{.rough = true, .result = -EINVAL}, Weather{.rough = true, .lies = true}}) {
    const Reader reader(data.paths, {}, calls_in(weather));
    for (int round = 0; round < 3; ++round) check_batch(reader, data, random, 200);
    const int before = direct_reads;
    for (int round = 0; round < 3; ++round) check_batch(reader, data, random, 200);
    CHECK(direct_reads == before);
  }
  const Reader reader(data.paths, {}, calls_in({.rough = true}));
  for (int round = 0; round < 5; ++round) {
    const int before = direct_reads;
    check_batch(reader, data, random, 200);
    CHECK(direct_reads > before);
  }
  // A failing disk is an error, not a refusal.
  const Reader broken(data.paths, {.strategy = Strategy::direct}, calls_in({.result = -EIO}));
  CHECK(code_of(broken, all(data), "cannot read record file") == ff::Code::storage);
}

void damaged(const Data& data) {
  const std::vector<Bytes> few(data.samples.begin(), data.samples.begin() + 120);
  for (const Strategy strategy : kAll) {
    for (const bool rough : {false, true}) {
      const std::string path = store(few, "-damaged.ffr");
      {
        const Reader reader({path}, {.strategy = strategy}, calls_in({.rough = rough}));
        const std::int64_t at = reader.files()[0]->at(17).offset + 270'000;
        const int fd = ::open(path.c_str(), O_WRONLY);
        const auto wrong = static_cast<unsigned char>(few[17][270'000] ^ 1);
        CHECK(::pwrite(fd, &wrong, 1, at) == 1);
        std::vector<std::int64_t> wanted;
        for (std::int64_t i = 0; i < 120; ++i) wanted.push_back(119 - i);
        CHECK(code_of(reader, wanted, "sample 17 ") == ff::Code::corrupted);
        const Reader trusting({path}, {.check_data = false, .strategy = strategy}, calls_in({.rough = rough}));
        CHECK(trusting.read(wanted.data(), wanted.size()).count == 120);
        CHECK(::ftruncate(fd, at) == 0);
        CHECK(code_of(trusting, wanted, "shorter than when it was opened") == ff::Code::corrupted);
        ::close(fd);
      }
      ::unlink(path.c_str());
    }
  }
}

void views(const Data& data) {
  const Reader reader(data.paths, {});
  const auto wanted = all(data);
  for (int round = 0; round < 2; ++round) {
    const auto found = reader.views(wanted.data(), wanted.size());
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const std::uint8_t* const at = reader.mapping(found[i].file)->data() + found[i].at.offset;
      CHECK(std::equal(data.samples[i].begin(), data.samples[i].end(), at, at + found[i].at.bytes));
    }
  }
}

// After any number of batches two blocks are kept, none too large for the current reads.
void memory(const Data& data) {
  const auto indices = all(data);
  std::size_t whole = 0;
  {
    const Reader reader(data.paths, {});
    std::vector<Batch> batches;
    for (int i = 0; i < 5; ++i) batches.push_back(reader.read(indices.data(), indices.size()));
    whole = Block::in_process() / 5;
    CHECK(whole >= batches[0].bytes() && whole < 2 * batches[0].bytes());
    batches.clear();
    CHECK(Block::in_process() == 2 * whole);
    const Batch again = reader.read(indices.data(), indices.size());
    CHECK(Block::in_process() == 2 * whole);
    const std::int64_t one = 17;
    const Batch small = reader.read(&one, 1);
    CHECK(Block::in_process() < 2 * whole);
  }
  CHECK(Block::in_process() == 0);
  Batch outlives, shorter;
  {
    const Reader reader(data.paths, {});
    shorter = reader.read(indices.data(), indices.size());
    const Batch other = reader.read(indices.data(), indices.size());
    outlives = reader.read(indices.data(), indices.size());
  }
  CHECK(Block::in_process() == 2 * whole);
  shorter = Batch();
  CHECK(Block::in_process() == whole && outlives.arena.data()[outlives.offsets[17]] == data.samples[17][0]);
}

void many_threads(const Data& data) {
  for (const Strategy strategy : kAll) {
    const Reader reader(data.paths, {.strategy = strategy}, calls_in({.rough = true}));
    std::vector<std::thread> threads;
    for (unsigned seed = 0; seed < 4; ++seed) {
      threads.emplace_back([&, seed] {
        std::mt19937 random(seed);
        for (int round = 0; round < 6; ++round) check_batch(reader, data, random, 60);
      });
    }
    for (auto& thread : threads) thread.join();
  }
}

// The real kernel of this machine; it may refuse `direct`.
void real(const Data& data) {
  std::mt19937 random(4);
  for (const Strategy strategy : kAll) {
    const Reader reader(data.paths, {.strategy = strategy});
    try {
      for (int round = 0; round < 5; ++round) check_batch(reader, data, random, 100);
    } catch (const ff::Error& error) {
      const int fd = kernel().open_direct(reader.files()[0]->fd());
      CHECK(strategy == Strategy::direct && (fd < 0 || kernel().queue(8) == nullptr));
      if (fd >= 0) ::close(fd);
    }
  }
}

}  // namespace

int main() {
  const Data data;
  memory(data);
  same_bytes(data);
  barred(data);
  damaged(data);
  views(data);
  many_threads(data);
  real(data);
  return 0;
}

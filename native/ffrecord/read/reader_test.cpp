// Tests the reader on damaged files of both versions, for the builds with sanitizers: for any bytes it returns samples
// or throws ff::Error. Also tests many threads on one reader.
#include "ffrecord/read/reader.hpp"

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <random>
#include <thread>

#include "base/error.hpp"
#include "base/testing/check.hpp"
#include "ffrecord/format/v2_encode.hpp"

namespace {

using ff::ffrecord::Batch;
using ff::ffrecord::Reader;
using ff::ffrecord::testing::Bytes;
using ff::ffrecord::testing::encode_v1;
using ff::ffrecord::testing::encode_v2;

void seal(Bytes& file, std::size_t metadata_end) { ff::ffrecord::testing::seal(file, 0, metadata_end); }

// A file in the temporary directory, which the destructor removes.
class Scratch {
 public:
  Scratch() : path_("/tmp/fireflyer-reader-test-" + std::to_string(::getpid()) + ".ffr") {}
  ~Scratch() { ::unlink(path_.c_str()); }
  const std::string& store(const Bytes& bytes) const {
    std::FILE* file = std::fopen(path_.c_str(), "wb");
    CHECK(file != nullptr);
    CHECK(bytes.empty() || std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size());
    std::fclose(file);
    return path_;
  }

 private:
  std::string path_;
};

// Reads all samples twice in reverse order; false if the reader refused.
bool readable(const std::string& path, bool check_data) {
  try {
    const Reader reader({path, path}, {.check_data = check_data});
    std::vector<std::int64_t> all;
    for (std::int64_t i = reader.count(); i > 0; --i) all.insert(all.end(), {i - 1, i - 1});
    const Batch batch = reader.read(all.data(), all.size());
    for (std::size_t i = 0; i < batch.bytes(); ++i) static_cast<void>(*(volatile std::uint8_t*)&batch.arena.data()[i]);
    reader.check_all();
    return true;
  } catch (const ff::Error&) {
    return false;
  }
}

void damage(const Scratch& scratch, const Bytes& good, std::mt19937_64& random) {
  const std::size_t metadata_end = 12 + 12 * 5;
  for (std::size_t cut = 0; cut < good.size(); ++cut)
    CHECK(!readable(scratch.store(Bytes(good.begin(), good.begin() + cut)), true));
  for (std::size_t at = 0; at < good.size(); ++at) {
    Bytes bad = good;
    bad[at] = static_cast<unsigned char>(bad[at] ^ 0x40);
    CHECK(!readable(scratch.store(bad), true));
    if (at < 4 || at >= metadata_end) continue;
    for (int value : {0x00, 0x7F, 0x80, 0xFF}) {  // a wrong value in the metadata under a valid checksum
      bad[at] = static_cast<unsigned char>(value);
      seal(bad, metadata_end);
      readable(scratch.store(bad), false);
      std::memset(bad.data(), 0, 4);
      readable(scratch.store(bad), false);
    }
  }
  for (int round = 0; round < 2000; ++round) {
    Bytes bad = good;
    for (int change = 0; change < 3; ++change) {
      const std::size_t field = 4 + 4 * (random() % ((metadata_end - 4) / 4));
      const std::uint64_t value = random() >> (random() % 64);
      std::memcpy(bad.data() + field, &value, 4);
    }
    seal(bad, metadata_end);
    readable(scratch.store(bad), round % 2 == 0);
  }
}

void damage_v2(const Scratch& scratch, const Bytes& good) {
  CHECK(readable(scratch.store(good), true));
  for (std::size_t cut = 0; cut < good.size(); cut += cut % 4096 < 80 ? 1 : 61)
    CHECK(!readable(scratch.store(Bytes(good.begin(), good.begin() + cut)), true));
  for (std::size_t at = 0; at < good.size(); ++at) {
    const bool used = good[at] != 0 || at < 4096;
    if (!used && at % 509 != 0) continue;
    Bytes bad = good;
    bad[at] = static_cast<unsigned char>(bad[at] ^ 0x40);
    const bool read = readable(scratch.store(bad), true);
    CHECK(!read || !used);
    ff::ffrecord::testing::seal_v2(bad);
    readable(scratch.store(bad), false);
  }
}

// Threads on one reader of a fresh file check its index pages at the same time.
void share(const Scratch& scratch, const Bytes& file, const std::vector<Bytes>& samples) {
  const Reader reader({scratch.store(file)}, {});
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&reader, &samples, seed] {
      std::mt19937 random(seed);
      for (int round = 0; round < 50; ++round) {
        std::vector<std::int64_t> wanted(40);
        for (auto& index : wanted) index = random() % samples.size();
        const Batch batch = reader.read(wanted.data(), wanted.size());
        for (std::size_t j = 0; j < wanted.size(); ++j) {
          const Bytes& sample = samples[wanted[j]];
          CHECK(batch.offsets[j + 1] - batch.offsets[j] == static_cast<std::int64_t>(sample.size()) &&
                std::equal(sample.begin(), sample.end(), batch.arena.data() + batch.offsets[j]));
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace

int main() {
  std::mt19937_64 random(1);
  const Scratch scratch;
  const auto bytes = [&random](std::size_t size) {
    Bytes data(size);
    for (auto& byte : data) byte = static_cast<unsigned char>(random());
    return data;
  };
  const std::vector<Bytes> few = {bytes(5), bytes(0), bytes(40), bytes(1), bytes(7)};
  CHECK(readable(scratch.store(encode_v1(few)), true));
  if (!FF_THREAD_SANITIZER) {  // these tests start no thread, so the thread sanitizer would find nothing
    damage(scratch, encode_v1(few), random);
    damage_v2(scratch, encode_v2({few}, "{}"));
  }
  std::vector<Bytes> many;
  for (std::size_t i = 0; i < 500; ++i) many.push_back(bytes(i * 37 % 5000));
  share(scratch, encode_v1(many), many);
  const auto middle = many.begin() + 300;
  share(scratch, encode_v2({{many.begin(), middle}, {middle, many.end()}}), many);
  return 0;
}

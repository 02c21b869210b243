// The reader on damaged files, for the sanitizers: whatever the bytes are, it answers or throws ff::Error.
// Also many threads on one reader.
#include "ffrecord/reader.hpp"

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <random>
#include <thread>

#include "base/check.hpp"
#include "base/crc32.hpp"
#include "base/error.hpp"

namespace {

using ff::ffrecord::Batch;
using ff::ffrecord::Reader;
using Bytes = std::vector<unsigned char>;

template <typename T>
void append(Bytes& bytes, const T& value) {
  const std::size_t end = bytes.size();
  bytes.resize(end + sizeof value);
  std::memcpy(bytes.data() + end, &value, sizeof value);
}

void seal(Bytes& file, std::size_t metadata_end) {
  const std::uint32_t sum = ff::crc32(0, file.data() + 4, metadata_end - 4);
  std::memcpy(file.data(), &sum, 4);
}

Bytes encode(const std::vector<Bytes>& samples) {
  Bytes file(4);
  const auto n = static_cast<std::int64_t>(samples.size());
  append(file, n);
  for (const Bytes& sample : samples) append(file, ff::crc32(0, sample.data(), sample.size()));
  std::int64_t offset = 12 + 12 * n;
  for (const Bytes& sample : samples) {
    append(file, offset);
    offset += static_cast<std::int64_t>(sample.size());
  }
  seal(file, file.size());
  for (const Bytes& sample : samples) file.insert(file.end(), sample.begin(), sample.end());
  return file;
}

// A file in the temporary directory, removed with its owner.
class Scratch {
 public:
  Scratch() : path_("/tmp/fireflyer-reader-test-" + std::to_string(::getpid()) + ".ffr") {}
  ~Scratch() { ::unlink(path_.c_str()); }
  const std::string& store(const Bytes& bytes) const {
    std::FILE* file = std::fopen(path_.c_str(), "wb");
    CHECK(file != nullptr);
    for (const unsigned char byte : bytes) CHECK(std::fputc(byte, file) == byte);
    std::fclose(file);
    return path_;
  }

 private:
  std::string path_;
};

// Reads everything twice over in reverse order; false when the reader refused.
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
    for (int value : {0x00, 0x7F, 0x80, 0xFF}) {  // a lie in the metadata under a right checksum
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

void share(const Scratch& scratch, const std::vector<Bytes>& samples) {
  const Reader reader({scratch.store(encode(samples))}, {});
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
  CHECK(readable(scratch.store(encode(few)), true));
  damage(scratch, encode(few), random);
  std::vector<Bytes> many;
  for (std::size_t i = 0; i < 500; ++i) many.push_back(bytes(i * 37 % 5000));
  share(scratch, many);
  return 0;
}

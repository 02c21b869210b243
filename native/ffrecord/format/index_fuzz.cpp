// Fuzzer of opening and reading record files: any bytes are read or refused with ff::Error, without an access outside
// the file. Inputs start as valid files. Most changed inputs get valid checksums again, so that the checksum checks do
// not hide how wrong values are handled.
// The entry point is libFuzzer's. Without libFuzzer, base/testing/fuzz_driver.hpp mutates valid files from seeds 0, 1,
// ..: index_fuzz [SECONDS] (default 10); index_fuzz seed N repeats one seed.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "base/error.hpp"
#include "base/testing/check.hpp"
#include "base/testing/fuzz_driver.hpp"
#include "base/testing/one_thread.hpp"
#include "ffrecord/format/v2_encode.hpp"
#include "ffrecord/read/reader.hpp"

namespace {

using ff::ffrecord::kPage;
using ff::ffrecord::RecordFile;
using ff::ffrecord::Strategy;
using ff::ffrecord::testing::Bytes;
namespace testing = ff::ffrecord::testing;

// Maximum number of samples that are read one by one. The first index page and the first run of a valid file hold
// fewer.
constexpr std::int64_t kOneByOne = 300;
constexpr std::int64_t kAtOnce = 1000;  // maximum number of samples that are read in one batch

// Uses every method of the file: reads up to kOneByOne samples one by one, and up to kAtOnce samples in one batch.
void use(const std::string& path) {
  struct stat status;
  CHECK(::stat(path.c_str(), &status) == 0);
  // The size of the file picks the strategy. 5 of 64 sizes pick the 5 strategies; the other sizes pick `cached`, which
  // needs the least setup.
  const auto kind = status.st_size / 8 % 64;
  const auto strategy = kind < 5 ? static_cast<Strategy>(kind) : Strategy::cached;
  const ff::ffrecord::Reader reader({path}, {.strategy = strategy});
  const RecordFile& file = *reader.files()[0];
  CHECK(file.count() >= 0);
  for (std::int64_t i = 0; i < file.count() && i < kOneByOne; ++i) {
    try {
      const ff::ffrecord::Extent extent = file.at(i);
      CHECK(extent.offset >= 0 && extent.bytes >= 0 && extent.offset + extent.bytes <= file.size());
      const auto batch = reader.read(&i, 1);
      CHECK(ff::crc32(0, batch.arena.data(), batch.bytes()) == extent.crc);
    } catch (const ff::Error&) {
    }
  }
  std::vector<std::int64_t> all(static_cast<std::size_t>(std::min(file.count(), kAtOnce)));
  std::iota(all.begin(), all.end(), 0);
  try {
    const auto batch = reader.read(all.data(), all.size());
    for (const std::int64_t i : all) {
      const std::uint8_t* const start = batch.arena.data() + batch.offsets[i];
      const auto bytes = static_cast<std::size_t>(batch.offsets[i + 1] - batch.offsets[i]);
      CHECK(ff::crc32(0, start, bytes) == file.at(i).crc);
    }
  } catch (const ff::Error&) {
  }
  reader.check_all();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const int fd = ::memfd_create("fuzz", MFD_CLOEXEC);
  static const std::string path = "/proc/self/fd/" + std::to_string(fd);
  CHECK(::ftruncate(fd, 0) == 0);
  CHECK(::pwrite(fd, data, size, 0) == static_cast<ssize_t>(size));
  try {
    use(path);
  } catch (const ff::Error&) {
  }
  return 0;
}

namespace {

using Random = std::mt19937_64;

std::vector<Bytes> seeds() {
  std::vector<Bytes> samples;
  for (std::size_t i = 0; i < 140; ++i) samples.emplace_back(i % 13, static_cast<unsigned char>(i));
  const std::vector<Bytes> few(samples.begin(), samples.begin() + 5);
  Bytes torn = testing::encode_v2({few, samples, few});
  torn[static_cast<std::size_t>(kPage) + sizeof(ff::ffrecord::V2Slot)] = 1;  // damages the last commit's slot
  return {testing::encode_v1({}),
          testing::encode_v1(few),
          testing::encode_v2({{}}),
          testing::encode_v2({few}),
          testing::encode_v2({few, samples, few}),
          torn,
          testing::encode_v2({few, few}, "{\"columns\": [{\"name\": \"a\", \"dtype\": \"int8\", \"shape\": []}]}")};
}

// Makes one change. Mostly changes nonzero bytes and the bytes around them, because the structures are there.
void change(Bytes& file, Random& random) {
  if (file.empty()) return;
  std::size_t at = random() % file.size();
  for (int tries = 0; tries < 64 && file[at] == 0; ++tries) at = random() % file.size();
  const std::size_t field = at & ~std::size_t{7};
  switch (random() % 8) {
    case 0: file[at] ^= static_cast<unsigned char>(1 << random() % 8); break;
    case 1: file[at] = static_cast<unsigned char>(random()); break;
    case 2: file.resize(random() % (file.size() + 1)); break;
    case 3: file.resize(file.size() + random() % (2 * kPage)); break;
    case 4: file[at & ~std::size_t{kPage - 1}] = static_cast<unsigned char>(random()); break;
    case 5: {  // another field of the same file
      const std::size_t from = random() % file.size() & ~std::size_t{7};
      if (field + 8 <= file.size() && from + 8 <= file.size()) std::memcpy(file.data() + field, file.data() + from, 8);
      break;
    }
    default: {  // an extreme number
      static constexpr std::uint64_t kNumbers[] = {0,          1,          7,          8,
                                                   127,        128,        kPage,      3 * kPage,
                                                   1ull << 31, 1ull << 32, 1ull << 62, (1ull << 63) - 1,
                                                   1ull << 63, ~0ull,      ~0ull - 7};
      std::uint64_t value = kNumbers[random() % std::size(kNumbers)];
      if (random() % 2 == 0) value = file.size() - random() % 32;
      const std::size_t size = random() % 2 == 0 ? 8 : 4;
      if (field + size <= file.size()) std::memcpy(file.data() + field, &value, size);
    }
  }
}

void seal(Bytes& file) {
  if (file.size() < 12) return;
  if (std::memcmp(file.data(), ff::ffrecord::kMagic, 8) == 0) return testing::seal_v2(file);
  std::int64_t n;
  std::memcpy(&n, file.data() + 4, 8);
  if (n >= 0 && n <= static_cast<std::int64_t>(file.size()) / 12)
    testing::seal(file, 0, static_cast<std::size_t>(12 + 12 * n));
}

const Bytes& good_file(Random& random) {
  static const std::vector<Bytes> good = seeds();
  return good[random() % good.size()];
}

}  // namespace

#ifdef FF_LIBFUZZER
extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                               unsigned seed) {
  Random random(seed);
  Bytes file(data, data + size);
  // Makes a valid file even if the corpus is empty.
  if (size < 12 || random() % 64 == 0) file = good_file(random);
  for (std::uint64_t changes = random() % 4; changes > 0; --changes) {
    if (random() % 4 != 0) {
      change(file, random);
    } else {
      file.resize(std::min(file.size(), max_size));
      const std::size_t before = file.size();
      file.resize(max_size);
      file.resize(LLVMFuzzerMutate(file.data(), before, max_size));
    }
  }
  if (random() % 8 != 0) seal(file);
  file.resize(std::min(file.size(), max_size));
  std::copy(file.begin(), file.end(), data);
  return file.size();
}
#else
namespace {

void run_seed(std::uint64_t seed) {
  Random random(seed);
  Bytes file = good_file(random);
  for (std::uint64_t changes = random() % 4 + 1; changes > 0; --changes) change(file, random);
  if (random() % 8 != 0) seal(file);
  LLVMFuzzerTestOneInput(file.data(), file.size());
}

}  // namespace

int main(int argc, char** argv) { return ff::fuzz_main(argc, argv, run_seed); }
#endif

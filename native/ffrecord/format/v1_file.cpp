#include "ffrecord/format/v1_file.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/crc/crc32.hpp"

namespace ff::ffrecord {
namespace {

constexpr std::int64_t kHeader = 12;       // u32 checksum of the metadata, i64 number of samples
constexpr std::int64_t kPerSample = 12;    // u32 checksum, i64 offset
constexpr std::int64_t kStep = 256 << 10;  // bytes of a block, which stays in the L2 cache between read and checksum

template <typename T>
T load(const unsigned char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

}  // namespace

V1File::V1File(std::string path, int fd) : RecordFile(std::move(path), fd) {
  size_ = file_size();
  if (size_ < kHeader) corrupted(std::to_string(size_) + " bytes are too few for a header");
  unsigned char header[kHeader];
  read(header, kHeader, 0);
  const auto stored = load<std::uint32_t>(header);
  count_ = load<std::int64_t>(header + 4);
  if (count_ < 0 || count_ > (size_ - kHeader) / kPerSample)
    corrupted("its header claims " + std::to_string(count_) + " samples, its " + std::to_string(size_) +
              " bytes cannot hold their index");
  if (stored == 0 && count_ == 0) corrupted("its header is empty, as a writer that died leaves it");
  check_index(stored, crc32(0, header + 4, 8));
  mapping_.map(this->fd(), kHeader + kPerSample * count_, this->path());
}

// `found` is the CRC32 of the number of samples, the only metadata before the index; it is continued over the index.
void V1File::check_index(std::uint32_t stored, std::uint32_t found) {
  const std::int64_t first = kHeader + kPerSample * count_;
  std::vector<std::int64_t> block(static_cast<std::size_t>(kStep) / 8);
  for (std::int64_t at = kHeader, end = kHeader + 4 * count_; at < end;) {
    const auto step = static_cast<std::size_t>(std::min(kStep, end - at));
    read(block.data(), step, at);
    found = crc32(found, block.data(), step);
    at += static_cast<std::int64_t>(step);
  }
  // Finds the first sample whose offset is smaller than the offset of the sample before. Reports that sample only if
  // the checksum is valid.
  std::int64_t previous = first;
  std::int64_t wrong = -1, before = 0, after = 0;
  std::int64_t start = first;
  for (std::int64_t i = 0; i < count_;) {
    const std::int64_t many = std::min(kStep / 8, count_ - i);
    const auto bytes = static_cast<std::size_t>(many) * 8;
    read(block.data(), bytes, kHeader + 4 * count_ + 8 * i);
    found = crc32(found, block.data(), bytes);
    if (i == 0) previous = start = block[0];
    if (wrong < 0) {
      std::int64_t last = previous;
      bool falls = false;
      for (std::int64_t k = 0; k < many; ++k) falls |= block[k] < last, last = block[k];
      if (falls) {
        std::int64_t k = 0;
        for (; block[k] >= previous; ++k) previous = block[k];
        wrong = i + k, before = previous, after = block[k];
      }
      previous = last;
    }
    i += many;
  }
  if (wrong < 0 && previous > size_) wrong = count_, before = previous, after = size_;
  metadata_checked_ = stored != 0 || found == 0;
  if (metadata_checked_ && stored != found)
    corrupted("its metadata has checksum " + hex(found) + ", its header says " + hex(stored));
  if (count_ == 0) start = size_;
  if (start != first)
    corrupted("its samples start at byte " + std::to_string(start) + " instead of " + std::to_string(first));
  if (wrong >= 0)
    corrupted("sample " + std::to_string(wrong - 1) + " starts at byte " + std::to_string(before) +
              ", after its end at " + std::to_string(after) + (wrong == count_ ? ", the end of the file" : ""));
}

Extent V1File::at(std::int64_t i) const {
  const unsigned char* const sums = mapping_.data() + kHeader;
  const unsigned char* const starts = sums + 4 * count_;
  const auto start = load<std::int64_t>(starts + 8 * i);
  const std::int64_t end = i + 1 < count_ ? load<std::int64_t>(starts + 8 * (i + 1)) : size_;
  if (start < mapping_.bytes() || end < start || end > size_)
    corrupted("the index entry of sample " + std::to_string(i) + " changed after the file was opened");
  return {start, end - start, end - start, load<std::uint32_t>(sums + 4 * i), kPlain};
}

}  // namespace ff::ffrecord

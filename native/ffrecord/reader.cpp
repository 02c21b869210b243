#include "ffrecord/reader.hpp"

#include <limits.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <stdexcept>

namespace ff::ffrecord {
namespace {

// A run is cut here so that the checksum finds its bytes in the cache.
constexpr std::int64_t kRunBytes = std::int64_t{1} << 20;
constexpr int kRunParts = 256;
constexpr std::int64_t kGapBytes = 4096;
static_assert(kRunParts <= IOV_MAX);

}  // namespace

Reader::Reader(const std::vector<std::string>& paths, bool check_data) : check_data_(check_data) {
  starts_.push_back(0);
  for (const std::string& path : paths) {
    files_.push_back(RecordFile::open(path));
    starts_.push_back(starts_.back() + files_.back()->count());
  }
}

std::size_t Reader::file_of(std::int64_t index) const {
  // upper_bound skips files without samples, which share their start with the next one.
  return static_cast<std::size_t>(std::upper_bound(starts_.begin(), starts_.end(), index) -
                                  starts_.begin() - 1);
}

Batch Reader::read(const std::int64_t* indices, std::size_t count) const {
  Batch batch;
  batch.count = count;
  batch.offsets = std::make_unique_for_overwrite<std::int64_t[]>(count + 1);
  std::vector<Want> wants(count);
  std::int64_t total = 0;
  std::vector<bool> mapped(files_.size());
  for (std::size_t slot = 0; slot < count; ++slot) {
    const std::int64_t index = indices[slot];
    if (index < 0 || index >= this->count())
      throw std::out_of_range("sample index " + std::to_string(index) + " is outside [0, " +
                              std::to_string(this->count()) + ")");
    wants[slot] = {index, slot};
    batch.offsets[slot] = total;
    const std::size_t file = file_of(index);
    if (!mapped[file]) files_[file]->check_mapped();
    mapped[file] = true;
    if (__builtin_add_overflow(total, files_[file]->at(index - starts_[file]).bytes, &total))
      throw std::bad_alloc();
  }
  batch.offsets[count] = total;
  batch.arena = std::make_unique_for_overwrite<std::uint8_t[]>(static_cast<std::size_t>(total));
  std::sort(wants.begin(), wants.end());
  for (std::size_t at = 0; at < count;) at = read_run(wants, at, batch);
  return batch;
}

// Reads the samples from wants[at] on that lie side by side in one file; returns the place after them.
std::size_t Reader::read_run(const std::vector<Want>& wants, std::size_t at, Batch& batch) const {
  const std::size_t number = file_of(wants[at].index);
  const RecordFile& file = *files_[number];
  const std::int64_t start = starts_[number];
  const std::int64_t end = starts_[number + 1];
  const auto place = [&](std::size_t want) { return batch.arena.get() + batch.offsets[wants[want].slot]; };
  const auto repeated = [&](std::size_t want) { return want > at && wants[want].index == wants[want - 1].index; };

  std::array<iovec, kRunParts> parts;
  std::array<std::uint8_t, kGapBytes> gap;  // what lies between two samples is read and dropped
  int used = 0;
  std::int64_t bytes = 0;
  const std::int64_t begin = file.at(wants[at].index - start).offset;
  const std::uint8_t* arena_end = nullptr;  // where a sample that follows in the arena too would start
  std::size_t stop = at;
  for (; stop < wants.size() && used + 1 < kRunParts && bytes < kRunBytes; ++stop) {
    if (repeated(stop)) continue;
    const std::int64_t index = wants[stop].index;
    if (index >= end || (stop > at && index != wants[stop - 1].index + 1)) break;
    const Extent extent = file.at(index - start);
    const std::int64_t skip = extent.offset - (begin + bytes);
    if (skip < 0 || skip > kGapBytes) break;
    if (skip > 0) {
      parts[used++] = {gap.data(), static_cast<std::size_t>(skip)};
      arena_end = nullptr;
    }
    const auto length = static_cast<std::size_t>(extent.bytes);
    std::uint8_t* const target = place(stop);
    if (target == arena_end) {
      parts[used - 1].iov_len += length;
    } else {
      parts[used++] = {target, length};
    }
    arena_end = target + length;
    bytes += skip + extent.bytes;
  }
  file.read(parts.data(), used, begin);

  for (std::size_t want = at; want < stop; ++want) {
    const std::int64_t i = wants[want].index - start;
    if (repeated(want)) {
      std::memcpy(place(want), place(want - 1), static_cast<std::size_t>(file.at(i).bytes));
    } else if (check_data_) {
      file.check(i, place(want));
    }
  }
  return stop;
}

std::vector<Extent> Reader::extents(const std::int64_t* indices, std::size_t count) const {
  for (const auto& file : files_) file->check_mapped();
  std::vector<Extent> found(count);
  for (std::size_t k = 0; k < count; ++k) {
    if (indices[k] < 0 || indices[k] >= this->count())
      throw std::out_of_range("sample index " + std::to_string(indices[k]) + " is outside [0, " +
                              std::to_string(this->count()) + ")");
    const auto [file, i] = locate(indices[k]);
    found[k] = file->at(i);
  }
  return found;
}

std::pair<const RecordFile*, std::int64_t> Reader::locate(std::int64_t index) const {
  const std::size_t file = file_of(index);
  return {files_[file].get(), index - starts_[file]};
}

void Reader::check_all() const {
  for (const auto& file : files_) file->check_all();
}

}  // namespace ff::ffrecord

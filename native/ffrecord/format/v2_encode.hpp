// Record files in memory for tests and the fuzzer; not part of the library.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/crc/crc32.hpp"
#include "ffrecord/format/v2_file.hpp"

namespace ff::ffrecord::testing {

using Bytes = std::vector<unsigned char>;

template <typename T>
void append(Bytes& bytes, const T& value) {
  const std::size_t end = bytes.size();
  bytes.resize(end + sizeof value);
  std::memcpy(bytes.data() + end, &value, sizeof value);
}

// Writes the checksum of [at + skip, at + size) to `at`. Does nothing if the file is too short.
inline void seal(Bytes& file, std::size_t at, std::size_t size, std::size_t skip = 4) {
  if (size < skip || at > file.size() || size > file.size() - at) return;
  const std::uint32_t sum = crc32(0, file.data() + at + skip, size - skip);
  std::memcpy(file.data() + at, &sum, 4);
}

inline Bytes encode_v1(const std::vector<Bytes>& samples) {
  Bytes file(4);
  const auto n = static_cast<std::int64_t>(samples.size());
  append(file, n);
  for (const Bytes& sample : samples) append(file, crc32(0, sample.data(), sample.size()));
  std::int64_t offset = 12 + 12 * n;
  for (const Bytes& sample : samples) {
    append(file, offset);
    offset += static_cast<std::int64_t>(sample.size());
  }
  seal(file, 0, file.size());
  for (const Bytes& sample : samples) file.insert(file.end(), sample.begin(), sample.end());
  return file;
}

// Makes one commit per list of samples; only the first list may be empty. Never merges the runs.
inline Bytes encode_v2(const std::vector<std::vector<Bytes>>& commits, const std::string& schema = "") {
  const auto fill = [](Bytes& bytes, std::size_t to) { bytes.resize((bytes.size() + to - 1) / to * to); };
  V2Header header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.version = 2;
  header.alignment = 8;
  header.schema_bytes = schema.size();
  header.schema_crc = crc32(0, schema.data(), schema.size());
  Bytes file;
  append(file, header);
  seal(file, 8, kPage - 8);
  file.insert(file.end(), schema.begin(), schema.end());
  fill(file, kPage);
  const std::size_t slots = file.size();
  file.resize(slots + 2 * kPage);
  std::vector<Run> runs;
  std::int64_t samples = 0;
  for (std::size_t number = 0; number < commits.size(); ++number) {
    std::vector<Extent> entries;
    for (const Bytes& sample : commits[number]) {
      fill(file, 8);
      const auto size = static_cast<std::int64_t>(sample.size());
      entries.push_back(
          {static_cast<std::int64_t>(file.size()), size, size, crc32(0, sample.data(), sample.size()), kPlain});
      file.insert(file.end(), sample.begin(), sample.end());
    }
    fill(file, kPage);
    const auto count = static_cast<std::int64_t>(entries.size());
    if (count > 0) runs.push_back({samples, static_cast<std::int64_t>(file.size()), count});
    for (std::int64_t at = 0; at < count; at += kPageEntries) {
      const std::int64_t used = std::min(kPageEntries, count - at);
      V2Page page{};
      page.used = static_cast<std::uint32_t>(used);
      page.first = samples + at;
      std::copy_n(entries.begin() + at, used, page.entries);
      append(file, page);
      seal(file, file.size() - kPage, kPage);
    }
    samples += count;
    const std::size_t footer = file.size();
    append(file, V2FooterHead{0, static_cast<std::uint32_t>(runs.size()), static_cast<std::int64_t>(number)});
    for (const Run& run : runs) append(file, run);
    seal(file, footer, file.size() - footer);
    const V2Slot slot{0,
                      0,
                      static_cast<std::int64_t>(number),
                      static_cast<std::int64_t>(footer),
                      static_cast<std::int64_t>(file.size() - footer),
                      static_cast<std::int64_t>(file.size()),
                      samples,
                      {0, 0}};
    const std::size_t place = slots + kPage * (number % 2);
    std::memcpy(file.data() + place, &slot, sizeof slot);
    seal(file, place, sizeof slot);
  }
  return file;
}

// Corrects all checksums of the metadata that it can find, so that the checksum checks accept wrong values.
inline void seal_v2(Bytes& file) {
  if (file.size() < sizeof(V2Header)) return;
  const auto number = [&file](std::size_t at) {
    std::int64_t value = -1;
    if (at + 8 <= file.size()) std::memcpy(&value, file.data() + at, 8);
    return value;
  };
  const auto size = static_cast<std::int64_t>(file.size());
  const std::int64_t schema = number(24);
  if (schema < 0 || schema > size - 3 * kPage) return;
  const std::uint32_t sum = crc32(0, file.data() + kPage, static_cast<std::size_t>(schema));
  std::memcpy(file.data() + 32, &sum, 4);
  seal(file, 8, kPage - 8);
  const auto slots = static_cast<std::size_t>(kPage * (1 + (schema + kPage - 1) / kPage));
  for (std::size_t slot = slots; slot <= slots + kPage; slot += kPage) {
    const std::int64_t footer = number(slot + 16), bytes = number(slot + 24);
    if (footer >= 0 && bytes >= 16 && bytes <= kPage && footer <= size - bytes) {
      for (std::int64_t run = footer + 16; run + 24 <= footer + bytes; run += 24) {
        const std::int64_t place = number(static_cast<std::size_t>(run) + 8);
        const std::int64_t pages = number(static_cast<std::size_t>(run) + 16) / kPageEntries;
        for (std::int64_t page = 0; page <= pages && page < 64; ++page)
          if (place >= 0 && place <= size) seal(file, static_cast<std::size_t>(place + page * kPage), kPage);
      }
      seal(file, static_cast<std::size_t>(footer), static_cast<std::size_t>(bytes));
    }
    if (number(slot + 8) != 0 || footer != 0) seal(file, slot, sizeof(V2Slot));
  }
}

}  // namespace ff::ffrecord::testing

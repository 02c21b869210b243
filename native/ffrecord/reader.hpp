// Random batch reads over several FFRecord files whose samples are numbered as one sequence.
//
// Threads: immutable after the constructor; `read` and `check_all` may run on any number of threads at once
// and after fork. A Batch owns its memory and outlives the reader.
//
// Invariants of a Batch of k indices: offsets has k + 1 values, offsets[0] == 0, sample j of the request is
// arena[offsets[j], offsets[j + 1]); a repeated index has its own copy in each of its places.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ffrecord/record_file.hpp"

namespace ff::ffrecord {

struct Batch {
  std::unique_ptr<std::uint8_t[]> arena;
  std::unique_ptr<std::int64_t[]> offsets;
  std::size_t count = 0;
  std::size_t bytes() const { return static_cast<std::size_t>(offsets[count]); }
};

class Reader {
 public:
  // Opens all files or throws; with `check_data` every read compares the checksum of each sample.
  Reader(const std::vector<std::string>& paths, bool check_data);
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  std::int64_t count() const { return starts_.back(); }
  const std::vector<std::unique_ptr<RecordFile>>& files() const { return files_; }

  // Reads the samples in the order of the file, neighbours with one system call. Throws
  // std::out_of_range for an index outside [0, count()), Code::corrupted for a damaged sample.
  Batch read(const std::int64_t* indices, std::size_t count) const;

  // Where the samples lie in their files, in the order of `indices`; throws what `read` throws.
  std::vector<Extent> extents(const std::int64_t* indices, std::size_t count) const;
  // The file of sample `index` of the sequence, and its number there. REQUIRES: 0 <= index < count().
  std::pair<const RecordFile*, std::int64_t> locate(std::int64_t index) const;

  // Checks every sample of every file.
  void check_all() const;

 private:
  // One place of the request: sample `index` of the sequence goes to places [slot] of the batch.
  struct Want {
    std::int64_t index;
    std::size_t slot;
    bool operator<(const Want& other) const { return index < other.index; }
  };
  std::size_t file_of(std::int64_t index) const;
  std::size_t read_run(const std::vector<Want>& wants, std::size_t at, Batch& batch) const;

  std::vector<std::unique_ptr<RecordFile>> files_;
  std::vector<std::int64_t> starts_;  // the index of each file's first sample; last: the number of samples
  bool check_data_;
};

}  // namespace ff::ffrecord

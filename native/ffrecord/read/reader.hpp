// Random batch reads over several FFRecord files whose samples are numbered as one sequence.
//
// Threads: the files are immutable after the constructor; `read`, `views` and `check_all` may run on any number of
// threads at once and after fork. A Batch may outlive the reader.
//
// Invariants of a Batch of k indices: offsets has k + 1 values, offsets[0] == 0, sample j of the request is
// arena[offsets[j], offsets[j + 1]) as it is stored; a repeated index has its own copy in each of its places.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ffrecord/format/record_file.hpp"
#include "ffrecord/read/arena.hpp"
#include "ffrecord/read/fetch.hpp"
#include "ffrecord/read/source.hpp"

namespace ff::ffrecord {

enum class Strategy {
  automatic,  // from the page cache; the rest with O_DIRECT or, if that is refused, as with `threads`
  cached,     // all through the page cache, with as many threads as copying uses
  direct,     // all with O_DIRECT; Code::storage if that is refused
  threads,    // all through the page cache, on many threads that wait
  mmap,       // copied from the mapped files
};

struct Options {
  bool check_data = true;
  Strategy strategy = Strategy::automatic;
  unsigned threads = 0;  // maximum per batch; 0: one per core, at most 4, for copying, and 16 for waits on the disk
};

struct Batch {
  Arena arena;
  std::unique_ptr<std::int64_t[]> offsets;
  std::size_t count = 0;
  std::size_t bytes() const { return static_cast<std::size_t>(offsets[count]); }
};

// Location of a sample in a mapped file.
struct View {
  std::size_t file;
  Extent at;
};

class Reader {
 public:
  // Opens all files or throws; with `check_data` every read checks each sample's checksum.
  Reader(const std::vector<std::string>& paths, const Options& options, const Calls& calls = kernel());
  ~Reader() { arenas_->close(); }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  std::int64_t count() const { return starts_.back(); }
  const std::vector<std::unique_ptr<RecordFile>>& files() const { return files_; }

  // Throws std::out_of_range for an index outside [0, count()), Code::corrupted for a damaged sample, Code::no_space if
  // the batch exceeds the memory.
  Batch read(const std::int64_t* indices, std::size_t count) const;

  // Returns the samples' places in their files, in the order of `indices`; throws what `read` throws.
  std::vector<Extent> extents(const std::int64_t* indices, std::size_t count) const;
  // Returns the file of sample `index` of the sequence, and the sample's number in that file.
  // REQUIRES: 0 <= index < count().
  std::pair<const RecordFile*, std::int64_t> locate(std::int64_t index) const;

  // Returns the samples' places in the mapped files, as stored. Each sample is checked once. Throws what `read` throws.
  std::vector<View> views(const std::int64_t* indices, std::size_t count) const;
  const std::shared_ptr<const MappedFile>& mapping(std::size_t file) const { return sources_[file]->mapping(); }

  // Checks every sample of every file.
  void check_all() const;

 private:
  // One requested sample: number `index` of the sequence, for position `slot` of the batch.
  struct Want {
    std::int64_t index;
    std::size_t slot;
    bool operator<(const Want& other) const { return index < other.index; }
  };
  std::size_t file_of(std::int64_t index) const;
  void bring_index(const std::vector<View>& found, const std::int64_t* indices) const;
  std::vector<View> find(const std::int64_t* indices, std::size_t count) const;
  void check_fits(const std::int64_t* indices, std::size_t count, bool copied) const;
  Job plan(std::vector<Want>& wants, const std::vector<View>& found, const Batch* batch) const;
  void fetch(Job& job) const;

  Options options_;
  Calls calls_;
  std::vector<std::unique_ptr<RecordFile>> files_;
  std::vector<std::unique_ptr<Source>> sources_;
  std::vector<std::int64_t> starts_;  // index of each file's first sample; last: number of samples
  std::shared_ptr<ArenaPool> arenas_ = std::make_shared<ArenaPool>();
  mutable ObjectCache<DirectQueue> queues_;
};

}  // namespace ff::ffrecord

#include "ffrecord/read/reader.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "base/error.hpp"
#include "ffrecord/format/v2_file.hpp"

namespace ff::ffrecord {
namespace {

constexpr std::size_t kLooked = std::size_t{1} << 20;  // samples of a large batch looked up at a time

}  // namespace

Reader::Reader(const std::vector<std::string>& paths, const Options& options, const Calls& calls)
    : options_(options), calls_(calls) {
  starts_.push_back(0);
  for (const std::string& path : paths) {
    files_.push_back(RecordFile::open(path));
    sources_.push_back(std::make_unique<Source>(*files_.back(), calls_));
    starts_.push_back(starts_.back() + files_.back()->count());
  }
}

std::size_t Reader::file_of(std::int64_t index) const {
  // upper_bound skips files without samples, which share their start with the next file.
  return static_cast<std::size_t>(std::upper_bound(starts_.begin(), starts_.end(), index) - starts_.begin() - 1);
}

// Starts reading all index pages that a batch touches for the first time. Page faults then find these pages cached or
// in flight. Otherwise each page fault would wait for the disk and for its readahead, one after the other.
void Reader::bring_index(const std::vector<View>& found, const std::int64_t* indices) const {
  std::vector<std::pair<std::size_t, std::int64_t>> pages;  // file, place
  for (std::size_t slot = 0; slot < found.size(); ++slot) {
    const std::size_t file = found[slot].file;
    const std::int64_t place = files_[file]->unread(indices[slot] - starts_[file]);
    if (place >= 0) pages.emplace_back(file, place);
  }
  std::sort(pages.begin(), pages.end());
  for (std::size_t first = 0, last; first < pages.size(); first = last) {
    const auto [file, start] = pages[first];
    std::int64_t end = start + kPage;
    for (last = first + 1; last < pages.size() && pages[last].first == file && pages[last].second <= end; ++last) {
      end = pages[last].second + kPage;
    }
    calls_.will_need(files_[file]->fd(), start, end - start);
  }
}

// Looks up the samples in the mapped index of each file, after a check of the file's size.
std::vector<View> Reader::find(const std::int64_t* indices, std::size_t count) const {
  std::vector<View> found(count);
  std::vector<bool> mapped(files_.size());
  for (std::size_t slot = 0; slot < count; ++slot) {
    const std::int64_t index = indices[slot];
    if (index < 0 || index >= this->count())
      throw std::out_of_range("sample index " + std::to_string(index) + " is outside [0, " +
                              std::to_string(this->count()) + ")");
    const std::size_t file = file_of(index);
    if (!mapped[file]) files_[file]->check_mapped();
    mapped[file] = true;
    found[slot].file = file;
  }
  bring_index(found, indices);
  for (std::size_t slot = 0; slot < count; ++slot) {
    const std::size_t file = found[slot].file;
    found[slot].at = files_[file]->at(indices[slot] - starts_[file]);
  }
  return found;
}

// Throws Code::no_space if memory cannot hold a large batch: the data kept for each sample and, if `copied`, the
// samples' bytes. Runs before anything of that size is allocated.
void Reader::check_fits(const std::int64_t* indices, std::size_t count, bool copied) const {
  if (count <= kLooked) return;
  std::size_t total = count * (sizeof(View) + sizeof(Want) + sizeof(Piece));
  for (std::size_t first = 0; copied && first < count && total <= machine_memory(); first += kLooked) {
    for (const View& view : find(indices + first, std::min(kLooked, count - first))) {
      if (__builtin_add_overflow(total, static_cast<std::size_t>(view.at.bytes), &total)) too_large(SIZE_MAX);
    }
  }
  if (total > machine_memory()) too_large(total);
}

// Sorts `wants` and returns their pieces without repeats. If `batch` is null, the pieces have no targets.
Job Reader::plan(std::vector<Want>& wants, const std::vector<View>& found, const Batch* batch) const {
  std::sort(wants.begin(), wants.end());
  Job job;
  job.check = options_.check_data;
  job.threads = options_.threads;
  job.pieces.reserve(wants.size());
  for (std::size_t i = 0; i < wants.size(); ++i) {
    if (i > 0 && wants[i].index == wants[i - 1].index) continue;
    const View& view = found[wants[i].slot];
    std::uint8_t* const target = batch != nullptr ? batch->arena.data() + batch->offsets[wants[i].slot] : nullptr;
    job.pieces.push_back({view.at, target, wants[i].index - starts_[view.file], sources_[view.file].get()});
    job.bytes += view.at.bytes;
  }
  // A file's samples may lie in another order than that of their numbers.
  for (auto first = job.pieces.begin(); first != job.pieces.end();) {
    const Source* const source = first->source;
    const auto last = std::find_if(first, job.pieces.end(), [&](const Piece& piece) { return piece.source != source; });
    const auto earlier = [](const Piece& a, const Piece& b) { return a.at.offset < b.at.offset; };
    if (!std::is_sorted(first, last, earlier)) std::stable_sort(first, last, earlier);
    first = last;
  }
  return job;
}

Batch Reader::read(const std::int64_t* indices, std::size_t count) const {
  check_fits(indices, count, true);
  Batch batch;
  batch.count = count;
  batch.offsets = std::make_unique_for_overwrite<std::int64_t[]>(count + 1);
  std::vector<Want> wants(count);
  const std::vector<View> found = find(indices, count);
  std::int64_t total = 0;
  for (std::size_t slot = 0; slot < count; ++slot) {
    wants[slot] = {indices[slot], slot};
    batch.offsets[slot] = total;
    if (__builtin_add_overflow(total, found[slot].at.bytes, &total)) too_large(INT64_MAX);
  }
  batch.offsets[count] = total;
  batch.arena = arenas_->take(static_cast<std::size_t>(total));
  Job job = plan(wants, found, &batch);
  fetch(job);
  for (std::size_t i = 1; i < count && job.pieces.size() < count; ++i) {
    if (wants[i].index != wants[i - 1].index) continue;
    const std::size_t from = wants[i - 1].slot, to = wants[i].slot;
    std::memcpy(batch.arena.data() + batch.offsets[to], batch.arena.data() + batch.offsets[from],
                static_cast<std::size_t>(batch.offsets[to + 1] - batch.offsets[to]));
  }
  return batch;
}

void Reader::fetch(Job& job) const {
  switch (options_.strategy) {
    case Strategy::automatic: {
      if (fetch_cached(job) == 0) return;
      // If the kernel hides which pages are cached, fetch_cached tries every read. A failed read makes the kernel read
      // the bytes into the page cache. Waiting for the cache reads the bytes once; O_DIRECT would read them again.
      const bool blind = std::any_of(job.pieces.begin(), job.pieces.end(),
                                     [](const Piece& piece) { return !piece.done && piece.source->blind; });
      if (blind || fetch_direct(job, queues_, calls_) > 0) fetch_waiting(job);
      return;
    }
    case Strategy::cached: return fetch_buffered(job);
    case Strategy::threads: return fetch_waiting(job);
    case Strategy::mmap: return fetch_mapped(job);
    case Strategy::direct:
      if (fetch_direct(job, queues_, calls_) > 0)
        throw Error(Code::storage,
                    "cannot read records past the page cache: the kernel bars io_uring, or the file system O_DIRECT; "
                    "use strategy \"auto\"");
  }
}

std::vector<View> Reader::views(const std::int64_t* indices, std::size_t count) const {
  check_fits(indices, count, false);
  std::vector<Want> wants(count);
  std::vector<View> found = find(indices, count);
  for (std::size_t slot = 0; slot < count; ++slot) wants[slot] = {indices[slot], slot};
  Job job = plan(wants, found, nullptr);
  verify_mapped(job);
  return found;
}

std::vector<Extent> Reader::extents(const std::int64_t* indices, std::size_t count) const {
  check_fits(indices, count, false);
  std::vector<Extent> extents;
  extents.reserve(count);
  for (const View& view : find(indices, count)) extents.push_back(view.at);
  return extents;
}

std::pair<const RecordFile*, std::int64_t> Reader::locate(std::int64_t index) const {
  const std::size_t file = file_of(index);
  return {files_[file].get(), index - starts_[file]};
}

void Reader::check_all() const {
  for (const auto& file : files_) file->check_all();
}

}  // namespace ff::ffrecord

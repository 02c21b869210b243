#include "ffrecord/format/v2_file.hpp"

#include <utility>

namespace ff::ffrecord {

V2File::V2File(std::string path, int fd)
    : RecordFile(std::move(path), fd),
      index_(this->path(), file_size(),
             {[this] { return file_size(); },
              [this](void* data, std::size_t size, std::int64_t offset) { read(data, size, offset); }}),
      checked_(std::make_unique<std::atomic<std::uint64_t>[]>(static_cast<std::size_t>(index_.pages() / 64 + 1))) {
  size_ = index_.end();
  mapping_.map(this->fd(), size_, this->path());
}

Extent V2File::at(std::int64_t i) const {
  const V2Index::Place place = index_.place(i);
  const auto& page = *reinterpret_cast<const V2Page*>(mapping_.data() + place.offset);
  if (!checked(place.number)) {
    index_.check(page, place);
    checked_[place.number / 64].fetch_or(std::uint64_t{1} << place.number % 64, std::memory_order_relaxed);
  }
  return index_.entry(page, place, i);
}

std::int64_t V2File::unread(std::int64_t i) const {
  const V2Index::Place place = index_.place(i);
  return checked(place.number) ? -1 : place.offset;
}

}  // namespace ff::ffrecord

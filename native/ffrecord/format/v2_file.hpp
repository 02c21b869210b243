// A local FFRecord v2 file. Opening reads header, schema, slots and footer. A page of the mapped index is checked when
// one of its samples is first requested.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "ffrecord/format/record_file.hpp"
#include "ffrecord/format/v2_index.hpp"

namespace ff::ffrecord {

class V2File final : public RecordFile {
 public:
  // Takes ownership of `fd`.
  V2File(std::string path, int fd);

  int version() const override { return 2; }
  std::int64_t count() const override { return index_.count(); }
  Extent at(std::int64_t i) const override;
  std::int64_t unread(std::int64_t i) const override;
  std::string schema() const override { return index_.schema(); }
  const V2Index& index() const { return index_; }

 private:
  bool checked(std::int64_t page) const {
    return (checked_[page / 64].load(std::memory_order_relaxed) >> page % 64 & 1) != 0;
  }

  V2Index index_;
  // One bit per checked page; two threads may check the same page.
  std::unique_ptr<std::atomic<std::uint64_t>[]> checked_;
};

}  // namespace ff::ffrecord

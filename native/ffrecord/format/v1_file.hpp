// FFRecord v1 (docs/guide/ffrecord.md). On opening, the whole index is checked by reads of small blocks and then
// mapped, so that only its used parts take memory.
#pragma once

#include "ffrecord/format/record_file.hpp"

namespace ff::ffrecord {

class V1File final : public RecordFile {
 public:
  // Takes ownership of `fd`.
  V1File(std::string path, int fd);

  int version() const override { return 1; }
  std::int64_t count() const override { return count_; }
  Extent at(std::int64_t i) const override;
  bool metadata_checked() const override { return metadata_checked_; }

 private:
  void check_index(std::uint32_t stored, std::uint32_t found);

  std::int64_t count_ = 0;
  bool metadata_checked_ = true;
};

}  // namespace ff::ffrecord

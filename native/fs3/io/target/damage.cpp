#include "fs3/io/target/damage.hpp"

#include <algorithm>
#include <utility>

namespace ff::fs3::io {
namespace {

constexpr auto kPause = std::chrono::seconds(2);  // between checks of damaged chunks
constexpr std::size_t kChecked = 16;              // chunks in each check
constexpr std::size_t kMost = 4096;               // chunks remembered; the next scrub finds the rest
constexpr std::size_t kMostFindings = 64;         // kept with chunk ids between two calls of findings()

}  // namespace

bool Damage::found(ChunkId chunk) {
  if (chunks_.empty()) next_ = Clock::now() + kPause;
  const bool news = chunks_.size() < kMost ? chunks_.insert(chunk).second : !chunks_.contains(chunk);
  if (news) note(chunk, true);
  return news;
}

void Damage::whole(ChunkId chunk) {
  if (chunks_.erase(chunk) != 0) note(chunk, false);
}

std::vector<ChunkId> Damage::due() {
  std::vector<ChunkId> chunks;
  if (chunks_.empty() || Clock::now() < next_) return chunks;
  for (auto at = chunks_.upper_bound(last_); chunks.size() < std::min(kChecked, chunks_.size()); ++at) {
    if (at == chunks_.end()) at = chunks_.begin();
    chunks.push_back(*at);
  }
  last_ = chunks.back();
  next_ = Clock::now() + kPause;
  return chunks;
}

Damage::Findings Damage::findings() { return std::exchange(findings_, {}); }

void Damage::note(ChunkId chunk, bool damaged) {
  if (findings_.first.size() < kMostFindings) {
    findings_.first.push_back({chunk, damaged});
  } else {
    ++findings_.more;
  }
}

}  // namespace ff::fs3::io

#include "fs3/io/wire/messages.hpp"

#include <cstring>
#include <type_traits>
#include <utility>

#include "fs3/io/wire/wire.hpp"

namespace ff::fs3::io {
namespace {

using replica::Message;

// Fields of each message, in wire order. Payload numbers are local to the shells and not sent.
void fields(auto&& f, auto& m, replica::Update*) {
  f(m.op, m.settled, m.from, m.chain_version, m.chunk.inode, m.chunk.index, m.base, m.version, m.kind, m.offset,
    m.length, m.tag.client, m.tag.channel, m.tag.seq, m.forget);
}
void fields(auto&& f, auto& m, replica::Answer*) { f(m.op, m.from, m.chain_version, m.status); }
void fields(auto&& f, auto& m, replica::PageAsk*) { f(m.op, m.from, m.chain_version, m.after.inode, m.after.index); }
void fields(auto&& f, auto& m, replica::Page*) { f(m.op, m.from, m.chain_version, m.more, m.floor, m.entries); }
void fields(auto&& f, auto& m, replica::SyncDone*) { f(m.op, m.from, m.chain_version, m.floor); }
void fields(auto&& f, auto& m, replica::Fetch*) {
  f(m.op, m.from, m.chain_version, m.chunk.inode, m.chunk.index, m.version, m.as_is);
}
void fields(auto&& f, auto& m, replica::Fetched*) {
  f(m.op, m.from, m.chain_version, m.chunk.inode, m.chunk.index, m.version, m.status, m.crc);
}
void fields(auto&& f, auto& m, replica::TagsAsk*) { f(m.op, m.from, m.chain_version); }
void fields(auto&& f, auto& m, replica::Tags*) { f(m.op, m.from, m.chain_version, m.floor); }

void one_entry(auto& f, auto& e) {
  f(e.chunk.inode, e.chunk.index, e.committed, e.length, e.crc, e.pending, e.removes, e.pending_crc);
}

class Out {
 public:
  explicit Out(std::vector<std::byte>& to) : to_(to) {}
  template <class... T>
  void operator()(const T&... values) {
    (one(values), ...);
  }

 private:
  template <class T>
  void one(const T& value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    const auto* from = reinterpret_cast<const std::byte*>(&value);
    to_.insert(to_.end(), from, from + sizeof value);
  }
  void one(const std::vector<replica::Entry>& entries) {
    one(static_cast<std::uint32_t>(entries.size()));
    for (const auto& e : entries) one_entry(*this, e);
  }
  std::vector<std::byte>& to_;
};

class In {
 public:
  explicit In(std::span<const std::byte> from) : from_(from) {}
  template <class... T>
  void operator()(T&... values) {
    (one(values), ...);
  }
  bool good() const { return good_; }
  std::span<const std::byte> rest() const { return from_; }

 private:
  static constexpr std::size_t kEntryBytes = 8 + 4 + 8 + 4 + 4 + 8 + 1 + 4;

  template <class T>
  void one(T& value) {
    if (from_.size() < sizeof value) good_ = false;
    if (!good_) return;
    if constexpr (std::is_same_v<T, bool>) {
      const auto byte = std::to_integer<unsigned>(from_[0]);
      good_ = byte <= 1;
      value = byte == 1;
    } else {
      std::memcpy(&value, from_.data(), sizeof value);
      if constexpr (std::is_same_v<T, Kind>) good_ = value <= Kind::replace;
      if constexpr (std::is_same_v<T, Status>) good_ = value <= Status::invalid;
    }
    from_ = from_.subspan(sizeof value);
  }
  void one(std::vector<replica::Entry>& entries) {
    std::uint32_t count = 0;
    one(count);
    if (!good_ || count > from_.size() / kEntryBytes) {
      good_ = false;
      return;
    }
    entries.resize(count);
    for (auto& e : entries) one_entry(*this, e);
  }
  std::span<const std::byte> from_;
  bool good_ = true;
};

template <std::size_t N = 0>
bool read_alternative(std::size_t which, In& in, Message& message) {
  if constexpr (N == std::variant_size_v<Message>) {
    return false;
  } else {
    if (which != N) return read_alternative<N + 1>(which, in, message);
    using T = std::variant_alternative_t<N, Message>;
    T value;
    fields(in, value, static_cast<T*>(nullptr));
    message = std::move(value);
    return in.good();
  }
}

}  // namespace

std::vector<std::byte> encode(const Posted& posted) {
  std::vector<std::byte> table;
  Out out(table);
  out(posted.to, static_cast<std::uint32_t>(posted.message.index()));
  std::visit([&]<class T>(const T& m) { fields(out, m, static_cast<T*>(nullptr)); }, posted.message);
  for (const std::uint32_t crc : posted.crcs) out(crc);
  return table;
}

std::optional<Posted> decode(std::span<const std::byte> table) {
  Posted posted;
  In in(table);
  std::uint32_t which = 0;
  in(posted.to, which);
  if (!in.good() || !read_alternative(which, in, posted.message)) return {};
  const auto rest = in.rest();
  if (rest.size() % sizeof(std::uint32_t) != 0 || rest.size() / sizeof(std::uint32_t) > kMostCrcs + 1) return {};
  posted.crcs.resize(rest.size() / sizeof(std::uint32_t));
  if (!rest.empty()) std::memcpy(posted.crcs.data(), rest.data(), rest.size());
  return posted;
}

replica::Op asks(const Message& message) {
  return std::visit(
      []<class T>(const T& m) -> replica::Op {
        constexpr bool answer = std::is_same_v<T, replica::Answer> || std::is_same_v<T, replica::Page> ||
                                std::is_same_v<T, replica::Fetched> || std::is_same_v<T, replica::Tags>;
        return answer ? 0 : m.op;
      },
      message);
}

namespace { constexpr std::size_t kTaggedBytes = 8 + 4 + 8 + 8 + 4 + 8 + 4; }  // namespace

std::vector<std::byte> encode_tags(std::span<const store::Tagged> tags) {
  std::vector<std::byte> bytes;
  bytes.reserve(tags.size() * kTaggedBytes);
  Out out(bytes);
  for (const auto& t : tags) {
    out(t.tag.client, t.tag.channel, t.tag.seq, t.chunk.inode, t.chunk.index, t.version, t.length);
  }
  return bytes;
}

std::optional<std::vector<store::Tagged>> decode_tags(std::span<const std::byte> payload) {
  if (payload.size() % kTaggedBytes != 0) return {};
  std::vector<store::Tagged> tags(payload.size() / kTaggedBytes);
  In in(payload);
  for (auto& t : tags) in(t.tag.client, t.tag.channel, t.tag.seq, t.chunk.inode, t.chunk.index, t.version, t.length);
  return tags;
}

}  // namespace ff::fs3::io

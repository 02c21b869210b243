// Files and extents that a service shares with a client on its machine: real chunk stores, and a client with slots.
#include "fs3/io/service/shared_files.hpp"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <string>

#include "base/crc/crc32c.hpp"
#include "base/testing/check.hpp"
#include "base/testing/one_thread.hpp"
#include "fs3/io/client/local_files.hpp"
#include "fs3/io/service/held_reads.hpp"
#include "fs3/store/disk/directory_disk.hpp"

namespace ff::fs3::io {
namespace {

using Bytes = std::vector<std::byte>;

class Nobody : public MessageSender {
  void post(std::weak_ptr<Target>, Posted, Content) override {}
  void pause(std::weak_ptr<Target>, replica::Op) override {}
  void aside(std::function<void()>) override {}
};

struct Folder {
  Folder() { CHECK(::mkdtemp(name.data()) != nullptr); }
  ~Folder() { std::filesystem::remove_all(name); }
  std::string name = "/tmp/sharing-XXXXXX";
};

std::shared_ptr<Target> target_in(const Folder& folder, TargetId id) {
  auto disk = std::make_shared<store::DirectoryDisk>(folder.name + "/" + std::to_string(id));
  auto store = store::Store::open(*disk, {id, id}, {.reserve_bytes = 0});
  return std::make_shared<Target>(std::move(disk), std::move(store), id, id, 1, std::make_shared<Nobody>());
}

Bytes filled(std::size_t size, int with) { return Bytes(size, static_cast<std::byte>(with)); }

void put(Target& target, ChunkId chunk, Version version, const Bytes& bytes) {
  CHECK(target.store().apply(1, {.chunk = chunk,
                                 .base = store::kAnyBase,
                                 .version = version,
                                 .kind = Kind::replace,
                                 .committed = true,
                                 .bytes = bytes}) == Status::ok);
  CHECK(target.store().sync().at(0).status == Status::ok);
}

// Both ends of a connection; the test reads the client's end frame by frame.
struct Ends {
  Ends() {
    int ends[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
    client = ends[1];
    line.emplace(ends[0], [this](const Head&) -> Pool& { return pool; });
    sharing.emplace(*line);
  }
  ~Ends() { ::close(client); }

  struct One {
    std::shared_ptr<Target> target;
    ChunkId chunk;
  };
  bool give(const std::vector<One>& wanted) {
    std::vector<store::Reading> readings;
    std::vector<std::shared_ptr<Target>> targets;
    for (const One& one : wanted) {
      readings.push_back(one.target->store().read(one.chunk, 0, 0, 1 << 20));
      targets.push_back(one.target);
    }
    const bool given = sharing->give(++request, readings, targets);
    CHECK(readings.empty() == given);
    CHECK(line->flush());
    return given;
  }
  // Takes the next answer as a client does; returns the buffers for each entry's bytes.
  std::vector<Bytes> take(std::size_t& fresh) {
    Head head;
    CHECK(files.receive(client, reinterpret_cast<std::byte*>(&head), sizeof head) == sizeof head);
    Bytes table(head.table_bytes);
    CHECK(::recv(client, table.data(), table.size(), 0) == static_cast<ssize_t>(table.size()));
    std::vector<Bytes> found(head.count, Bytes(1 << 20));
    pieces.assign(head.count, {});
    std::vector<Piece*> asked;
    for (std::size_t n = 0; n < head.count; ++n) {
      pieces[n].length = 1 << 20;
      pieces[n].memory = found[n].data();
      asked.push_back(&pieces[n]);
    }
    CHECK(landing.begin(head, table, asked));
    fresh = 0;
    for (std::size_t n = 0; n < head.count; ++n) fresh += landing.place(n).fresh;
    CHECK(files.take(landing));
    return found;
  }
  // Reads from the places that `take` found.
  void read(std::vector<Bytes>& found, std::size_t bytes) {
    files.read(landing);
    for (const Piece& piece : pieces) CHECK(piece.outcome == Outcome::ok);
    for (Bytes& one : found) one.resize(bytes);
  }

  Pool pool{1 << 20};
  int client = -1;
  std::optional<FrameConnection> line;
  std::optional<SharedFiles> sharing;
  std::uint64_t request = 0;
  LocalFiles files;
  std::vector<Piece> pieces;  // pieces of the answer that was taken
  ReadPlacement landing;
};

void bytes_stay_until_they_were_read() {
  Folder folder;
  const auto target = target_in(folder, 1);
  for (Version version = 1; version < 4; ++version) put(*target, {1, 0}, version, filled(30'000, 1));
  Ends ends;
  std::size_t fresh = 0;
  CHECK(ends.give({{target, {1, 0}}, {target, {1, 9}}}));
  auto found = ends.take(fresh);
  CHECK(fresh == 1 && ends.sharing->held() == 1 && target->store().statistics().held == 1);
  for (Version version = 4; version < 40; ++version) {  // all other extents are reused
    put(*target, {1, 0}, version, filled(30'000, 2));
    put(*target, {1, 1}, version, filled(30'000, 3));
  }
  ends.read(found, 30'000);
  CHECK(found[0] == filled(30'000, 1) && found[1] == filled(30'000, 0));
  CHECK(ends.give({{target, {1, 0}}}));
  found = ends.take(fresh);
  CHECK(fresh == 0 && ends.sharing->held() == 2);
  ends.read(found, 30'000);
  CHECK(found[0] == filled(30'000, 2));
  CHECK(!ends.sharing->done(3) && !ends.sharing->done(~std::uint32_t{0}) && ends.sharing->held() == 2);
  CHECK(ends.sharing->done(1) && ends.sharing->held() == 1);
  CHECK(!ends.sharing->done(0));
  CHECK(ends.sharing->done(2) && ends.sharing->done(2) && ends.sharing->held() == 0);
  CHECK(target->store().statistics().held == 0);
}

void descriptors_cannot_be_written_to() {
  Folder folder;
  const auto target = target_in(folder, 1);
  put(*target, {1, 0}, 1, filled(5000, 1));
  Ends ends;
  CHECK(ends.give({{target, {1, 0}}}));
  std::array<char, 64> head;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  iovec part{head.data(), head.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  CHECK(::recvmsg(ends.client, &message, MSG_CMSG_CLOEXEC) == 64);
  int file = -1;
  std::memcpy(&file, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof file);
  CHECK((::fcntl(file, F_GETFL) & O_ACCMODE) == O_RDONLY);
  CHECK(::pwrite(file, "x", 1, 0) < 0 && errno == EBADF);
  CHECK(::ftruncate(file, 0) < 0);
  ::close(file);
}

void slots_are_taken_in_turn() {
  Folder folder;
  std::vector<std::shared_ptr<Target>> targets;
  for (TargetId id = 1; id <= kLocalSlots + 8; ++id) {
    targets.push_back(target_in(folder, id));
    put(*targets.back(), {1, 0}, 1, filled(5000, static_cast<int>(id)));
  }
  Ends ends;
  std::vector<Ends::One> many;
  for (std::size_t n = 0; n <= kLocalSlots; ++n) many.push_back({targets[n], {1, 0}});
  std::vector<store::Reading> readings;
  std::vector<std::shared_ptr<Target>> of;
  for (const auto& one : many) {
    readings.push_back(one.target->store().read(one.chunk, 0, 0, 5000));
    of.push_back(one.target);
  }
  CHECK(!ends.sharing->give(1, readings, of));  // more files than slots
  CHECK(readings.size() == many.size() && of.size() == many.size() && ends.sharing->held() == 0);
  std::size_t fresh = 0, sent = 0;
  for (std::size_t round = 0; round < 60; ++round) {
    std::vector<Ends::One> some;
    for (std::size_t n = 0; n < 20; ++n) some.push_back({targets[(round * 7 + n) % targets.size()], {1, 0}});
    CHECK(ends.give(some));
    auto found = ends.take(fresh);
    sent += fresh;
    ends.read(found, 5000);
    for (std::size_t n = 0; n < 20; ++n)
      CHECK(found[n] == filled(5000, 1 + static_cast<int>((round * 7 + n) % targets.size())));
    CHECK(ends.sharing->done(static_cast<std::uint32_t>(round + 1)));
  }
  CHECK(sent >= targets.size() && sent < 60 * 20);
}

void what_is_held_is_bounded_and_let_go() {
  Folder folder;
  auto one = target_in(folder, 1), two = target_in(folder, 2);
  put(*one, {1, 0}, 1, filled(5000, 1));
  put(*two, {1, 0}, 1, filled(5000, 2));
  Ends ends;
  for (std::size_t n = 0; n < SharedFiles::kMostFrames; ++n) CHECK(ends.give({{n % 2 == 0 ? one : two, {1, 0}}}));
  {
    std::vector<store::Reading> readings(1);
    std::vector<std::shared_ptr<Target>> targets(1, one);
    CHECK(!ends.sharing->give(99, readings, targets));
  }
  CHECK(ends.sharing->held() == SharedFiles::kMostFrames);
  ends.sharing->forget(*one);
  CHECK(ends.sharing->held() == SharedFiles::kMostFrames / 2 && one->store().statistics().held == 0);
  CHECK(one.use_count() == 1);  // its store can be reopened
  one.reset();
  one = target_in(folder, 1);
  CHECK(ends.sharing->done(1));  // the client may still count an answer that is no longer held
  const auto now = SharedFiles::Clock::now();
  ends.sharing->expire(now);
  CHECK(ends.sharing->held() == SharedFiles::kMostFrames / 2);
  ends.sharing->expire(now + 2 * kLocalTime);
  CHECK(ends.sharing->held() == 0 && two->store().statistics().held == 0);
  CHECK(ends.sharing->done(SharedFiles::kMostFrames));
  CHECK(ends.give({{two, {1, 0}}, {one, {1, 0}}}));  // the new store's file is a different one
  std::size_t fresh = 0;
  for (std::size_t n = 0; n < SharedFiles::kMostFrames; ++n) ends.take(fresh);
  auto found = ends.take(fresh);
  CHECK(fresh == 1);
  ends.read(found, 5000);
  CHECK(found[0] == filled(5000, 2) && found[1] == filled(5000, 1));
  CHECK(ends.sharing->held() == 1);
  ends.sharing->clear();
  CHECK(two->store().statistics().held == 0);
}

// READs that wait for `go` hold extents, too; HeldReads::forget releases the extents of one target.
void what_waits_for_go_is_let_go_with_its_target() {
  const Folder folder;
  const auto one = target_in(folder, 1), two = target_in(folder, 2);
  for (const auto& target : {one, two}) put(*target, {1, 0}, 1, filled(5000, 1));
  HeldReads holding;
  for (const std::uint64_t request : {1, 2}) {
    HeldReads::Read read;
    read.head.request = request;
    read.targets.push_back(request == 1 ? one : two);
    read.readings.push_back(read.targets[0]->store().read({1, 0}, 0, 0, 1 << 20));
    CHECK(holding.begin(request) && holding.keep(std::move(read)));
  }
  CHECK(one->store().statistics().held == 1 && two->store().statistics().held == 1);
  holding.forget(*one);
  CHECK(one->store().statistics().held == 0 && two->store().statistics().held == 1 && holding.held() == 2);
  CHECK(holding.take(1)->readings.empty());
  CHECK(holding.take(2)->readings.size() == 1);
  CHECK(two->store().statistics().held == 0);
}

}  // namespace
}  // namespace ff::fs3::io

int main() {
  using namespace ff::fs3::io;
  bytes_stay_until_they_were_read();
  descriptors_cannot_be_written_to();
  slots_are_taken_in_turn();
  what_is_held_is_bounded_and_let_go();
  what_waits_for_go_is_let_go_with_its_target();
}

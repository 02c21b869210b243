#include "hai/suspend_page.hpp"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <utility>

#include "base/error.hpp"

namespace ff::hai {

namespace {

constexpr std::uint64_t kMagic = 0x3130'4750'5553'4646;  // "FFSUPG01"
constexpr std::uint64_t kFrozen = std::uint64_t{1} << 63;
constexpr std::uint64_t kApart = std::uint64_t{1} << 62;
constexpr std::uint64_t kCount = kApart - 1;
constexpr std::size_t kMaxSlots = 1 << 16;

void* map_shared(int fd, std::size_t bytes) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) throw_errno("cannot map the suspend page");
  return memory;
}

}  // namespace

struct SuspendPage::Head {
  std::uint64_t magic;
  std::uint64_t slots;
  std::atomic<std::uint64_t> decision;
  std::atomic<std::uint32_t> decided;
};

struct alignas(64) SuspendPage::Slot {
  std::atomic<std::uint64_t> state;
  std::atomic<std::uint32_t> flags;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

SuspendPage SuspendPage::create(std::size_t slots) {
  static_assert(sizeof(Head) <= 64 && sizeof(Slot) == 64);
  if (slots == 0 || slots > kMaxSlots) throw Error(Code::invalid, "invalid number of slots: expected 1 to 65536");
  const int fd = ::memfd_create("fireflyer-suspend", MFD_CLOEXEC);
  if (fd < 0) throw_errno("cannot create the suspend page");
  const std::size_t bytes = 64 * (slots + 1);
  try {
    if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0) throw_errno("cannot resize the suspend page");
    SuspendPage page(map_shared(fd, bytes), bytes, fd);
    page.head().slots = slots;
    page.head().magic = kMagic;  // no process can map the page before create() returns
    return page;
  } catch (...) {
    ::close(fd);
    throw;
  }
}

SuspendPage SuspendPage::map(int fd) {
  struct stat status{};
  if (::fstat(fd, &status) != 0) throw_errno("cannot read the size of the suspend page");
  const auto bytes = static_cast<std::size_t>(status.st_size);
  if (!S_ISREG(status.st_mode) || bytes < 128) throw Error(Code::corrupted, "the file is not a suspend page");
  SuspendPage page(map_shared(fd, bytes), bytes, -1);
  if (page.head().magic != kMagic || bytes != 64 * (page.head().slots + 1)) {
    throw Error(Code::corrupted, "the file is not a suspend page");
  }
  return page;
}

SuspendPage::SuspendPage(SuspendPage&& other) noexcept
    : memory_(std::exchange(other.memory_, nullptr)), bytes_(other.bytes_), fd_(std::exchange(other.fd_, -1)) {}

SuspendPage::~SuspendPage() {
  if (memory_ != nullptr) ::munmap(memory_, bytes_);
  if (fd_ >= 0) ::close(fd_);
}

SuspendPage::Head& SuspendPage::head() const { return *static_cast<Head*>(memory_); }

SuspendPage::Slot& SuspendPage::slot(std::size_t index) const {
  if (index >= slots()) throw Error(Code::invalid, "no such slot in the suspend page");
  return static_cast<Slot*>(memory_)[index + 1];
}

std::size_t SuspendPage::slots() const { return bytes_ / 64 - 1; }

std::uint64_t SuspendPage::begin_call(std::size_t index, bool& frozen) {
  auto& state = slot(index).state;
  frozen = false;
  if ((state.load() & kApart) != 0) return 0;  // the slot's rank is at another step than the other ranks
  const std::uint64_t before = state.fetch_add(1);
  frozen = (before & kFrozen) != 0;
  return (before & kCount) + 1;
}

SuspendPage::Wait SuspendPage::wait() {
  auto& word = head().decided;
  while (word.load() == 0) {
    const long rc = ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, 0u, nullptr, nullptr, 0);
    if (rc != 0 && errno == EINTR) return Wait::interrupted;
    if (rc != 0 && errno != EAGAIN) throw_errno("cannot wait for the decision on the suspend");
  }
  return Wait::decided;
}

bool SuspendPage::answer(std::size_t index, std::uint64_t number) {
  if (number < decision()) return false;
  slot(index).flags.fetch_or(told);
  return true;
}

void SuspendPage::acknowledge(std::size_t index) { slot(index).flags.fetch_or(acknowledged); }

void SuspendPage::set_apart(std::size_t index) { slot(index).state.fetch_or(kApart); }

void SuspendPage::begin(std::size_t index, std::uint64_t count) {
  if (count > kCount) throw Error(Code::invalid, "invalid count of calls: expected less than 2^62");
  auto& state = slot(index).state;
  std::uint64_t before = state.load();
  while (!state.compare_exchange_weak(before, (before & kFrozen) | count)) {
  }
}

void SuspendPage::join(std::size_t index) { slot(index).flags.fetch_or(joined); }

void SuspendPage::renew(std::size_t index) {
  slot(index).flags.store(0);
  set_apart(index);
}

std::vector<std::uint64_t> SuspendPage::freeze() {
  std::vector<std::uint64_t> counts(slots());
  for (std::size_t i = 0; i < counts.size(); ++i) counts[i] = slot(i).state.fetch_or(kFrozen) & kCount;
  return counts;
}

std::uint64_t SuspendPage::decide(std::uint64_t number) {
  if (number == 0) throw Error(Code::invalid, "invalid number of a call: expected at least 1");
  std::uint64_t before = 0;
  head().decision.compare_exchange_strong(before, number);
  auto& word = head().decided;
  word.store(1);
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  return before == 0 ? number : before;
}

std::uint64_t SuspendPage::decision() const { return head().decision.load(); }
std::uint64_t SuspendPage::count(std::size_t index) const { return slot(index).state.load() & kCount; }
std::uint32_t SuspendPage::flags(std::size_t index) const { return slot(index).flags.load(); }

}  // namespace ff::hai

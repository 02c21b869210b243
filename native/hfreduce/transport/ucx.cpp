#include "hfreduce/transport/ucx.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "base/process/fork_guard.hpp"

namespace ff::hfreduce {

using Clock = std::chrono::steady_clock;
using ucx::CallParams;
using ucx::Status;

namespace {

constexpr std::chrono::seconds kBrokenGrace{1};  // after it, a broken endpoint is a failure even if its socket is open
constexpr std::uint64_t kWholeTag = ~std::uint64_t{0};
// Event data of descriptors that are not links.
constexpr std::uint64_t kWake = 0, kEngine = 1;

CallParams params_of(void* argument) {
  CallParams params{};
  params.mask = CallParams::kCallback | CallParams::kArgument | CallParams::kMemoryType;
  params.memory_type = CallParams::kHost;
  params.argument = argument;
  return params;
}

void watch(int epoll, int fd, std::uint64_t data) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = data;
  if (::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) < 0) throw_errno("epoll");
}

}  // namespace

// ---- Construction and destruction -------------------------------------------------------------

UcxTransport::UcxTransport() : generation_(fork_guard::generation()), engine_(std::make_unique<ucx::Engine>()) {
  epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
  wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  try {
    if (epoll_ < 0 || wake_ < 0) throw_errno("epoll");
    fork_guard::add(epoll_);
    fork_guard::add(wake_);
    watch(epoll_, wake_, kWake);
    watch(epoll_, engine_->wakeup(), kEngine);
  } catch (...) {
    for (const int fd : {epoll_, wake_}) {
      if (fd >= 0) fork_guard::close(fd);
    }
    throw;
  }
}

UcxTransport::~UcxTransport() {
  if (fork_guard::generation() != generation_) {
    static_cast<void>(engine_.release());
  } else {
    // Messages that are done have left this process: see release_last().
    for (const Links* links : {&outgoing_, &incoming_}) {
      for (const auto& [rank, link] : *links) {
        if (!failed_ && !aborted_) link->line.send_leave(link->done);
      }
    }
    tear_down();
  }
  fork_guard::close(epoll_);
  fork_guard::close(wake_);
}

// All pending messages get their callbacks during this call, and none afterwards.
void UcxTransport::tear_down() noexcept {
  if (engine_ == nullptr) return;
  closing_ = true;
  const ucx::Api& api = engine_->api();
  for (const auto& [rank, link] : incoming_) {
    for (Message& message : link->messages) {
      if (message.state == State::under_way) api.request_cancel(engine_->worker(), message.request);
    }
  }
  for (const auto& [rank, link] : outgoing_) {
    if (link->endpoint != nullptr) engine_->close(link->endpoint);
    link->endpoint = nullptr;
  }
  settle_down();
  for (const Links* links : {&incoming_, &outgoing_}) {
    for (const auto& [rank, link] : *links) {
      for (Message& message : link->messages) {
        if (message.request != nullptr) api.request_free(message.request);
      }
    }
  }
  engine_.reset();
  for (const Links* links : {&incoming_, &outgoing_}) {
    for (const auto& [rank, link] : *links) link->messages.clear();
  }
}

// Waits until UCX has finished the sends of closed endpoints, for at most half a second; the rest ends with the worker.
void UcxTransport::settle_down() noexcept {
  const auto limit = Clock::now() + std::chrono::milliseconds(500);
  const auto under_way = [](const auto& entry) {
    const auto& messages = entry.second->messages;
    return std::any_of(messages.begin(), messages.end(), [](const Message& m) { return m.state == State::under_way; });
  };
  while (std::any_of(outgoing_.begin(), outgoing_.end(), under_way) && Clock::now() < limit) {
    engine_->progress();
  }
}

void UcxTransport::check() {
  if (failed_) throw Error(*failed_);
  if (aborted_) fail(Error(Code::collective, "the group was aborted"));
  if (arrivals_.any()) adopt();
}

void UcxTransport::fail(Error error) {
  failed_ = error;
  tear_down();
  throw error;
}

void UcxTransport::abort() {
  aborted_ = true;
  wake();
  const std::lock_guard lock(work_mutex_);
  tear_down();
}

void UcxTransport::wake() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t put = ::write(wake_, &one, sizeof one);
}

// ---- Links ------------------------------------------------------------------------------------

void UcxTransport::add_outgoing(int rank, int fd) { add(rank, fd, false); }
void UcxTransport::add_incoming(int rank, int fd) { add(rank, fd, true); }

void UcxTransport::add(int rank, int fd, bool incoming) {
  arrivals_.add(rank, fd, incoming);
  wake();
}

void UcxTransport::adopt() {
  const std::vector<Arrival> arrivals = arrivals_.take();
  // All descriptors get their owning links before anything can throw.
  for (const auto& [rank, incoming, fd] : arrivals) {
    Link& link = link_to(incoming ? incoming_ : outgoing_, rank, incoming);
    const ucx::LinkSocket::Handshake handshake{link.tag, engine_->address()};
    link.line.open(fd, incoming ? &handshake : nullptr);
  }
  for (const auto& [rank, incoming, fd] : arrivals) {
    listen(link_to(incoming ? incoming_ : outgoing_, rank, incoming), true);
  }
}

void UcxTransport::listen(Link& link, bool add) {
  epoll_event event{};
  event.events = EPOLLIN | (link.line.wants_to_write() ? EPOLLOUT : 0u);
  event.data.ptr = &link;
  if (::epoll_ctl(epoll_, add ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, link.line.fd(), &event) < 0) {
    throw_errno("epoll");
  }
}

UcxTransport::Link& UcxTransport::link_to(Links& links, int rank, bool incoming) {
  std::unique_ptr<Link>& link = links[rank];
  if (link == nullptr) {
    using Side = ucx::LinkSocket::Side;
    link.reset(new Link{this, rank, incoming, {incoming ? Side::receiver : Side::sender, rank}});
    if (incoming) link->tag = new_tag();
  }
  return *link;
}

std::uint64_t UcxTransport::new_tag() {
  std::uint64_t tag = 0;
  do {
    if (::getrandom(&tag, sizeof tag, 0) != sizeof tag) throw_errno("getrandom");
  } while (!tags_.insert(tag).second);
  return tag;
}

// Makes the endpoint of an outgoing link, after the receiver has sent its address.
void UcxTransport::start_endpoint(Link& link, const ucx::LinkSocket::Handshake& handshake) {
  using Params = ucx::EndpointParams;
  Params params{};
  params.mask = Params::kAddress | Params::kErrorMode | Params::kErrorHandler;
  params.address = reinterpret_cast<const ucx::Address*>(handshake.address.data());
  params.error_mode = Params::kPeerErrors;
  params.on_error = on_error;
  params.argument = &link;
  const Status status = engine_->api().endpoint_create(engine_->worker(), &params, &link.endpoint);
  if (status != Status::ok) {  // no route, or the peer's worker is already gone
    link.endpoint = nullptr;
    return break_link(link, status);
  }
  link.tag = handshake.tag;
  for (Message& message : link.messages) hand_over(message);
}

// Returns true if a link has events.
bool UcxTransport::poll(int timeout_ms, bool drain_wakes) {
  bool news = false;
  std::array<epoll_event, 64> events;
  const int n = ::epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), timeout_ms);
  if (n < 0 && errno != EINTR) throw_errno("epoll");
  for (int i = 0; i < n; ++i) {
    const epoll_event& event = events[static_cast<std::size_t>(i)];
    if (event.data.u64 == kEngine) continue;
    if (event.data.u64 == kWake) {
      std::uint64_t wakes;
      if (drain_wakes) [[maybe_unused]]
        const ssize_t got = ::read(wake_, &wakes, sizeof wakes);
      continue;
    }
    auto& link = *static_cast<Link*>(event.data.ptr);
    news = true;
    try {
      link.line.advance();
    } catch (const Error& violation) {
      fail(violation);
    }
    if (const auto handshake = link.line.take_handshake()) start_endpoint(link, *handshake);
    if (link.line.ended()) {
      ::epoll_ctl(epoll_, EPOLL_CTL_DEL, link.line.fd(), nullptr);
      troubled_.push_back(&link);
    } else {
      listen(link, false);
    }
  }
  return news;
}

// ---- Messages ---------------------------------------------------------------------------------

void UcxTransport::send(int rank, Transfer& transfer) {
  const std::lock_guard lock(work_mutex_);
  check();
  post(link_to(outgoing_, rank, false), transfer);
}

void UcxTransport::receive(int rank, Transfer& transfer) {
  const std::lock_guard lock(work_mutex_);
  check();
  post(link_to(incoming_, rank, true), transfer);
}

void UcxTransport::post(Link& link, Transfer& transfer) {
  transfer.moved = 0;
  transfer.done = transfer.bytes == 0;
  if (transfer.done) return;
  link.messages.push_back({&link, &transfer});
  ++pending_;
  ++posted_;
  if (link.incoming || link.endpoint != nullptr)
    hand_over(link.messages.back());  // else start_endpoint() hands it over, after the handshake
  settle();
}

void UcxTransport::hand_over(Message& message) {
  Link& link = *message.link;
  const Transfer& transfer = *message.transfer;
  CallParams params = params_of(&message);
  message.state = State::under_way;
  ucx::Request* request;
  if (link.incoming) {
    params.mask |= CallParams::kNeverAtOnce;
    params.received = on_received;
    request =
        engine_->api().tag_receive(engine_->worker(), transfer.data, transfer.bytes, link.tag, kWholeTag, &params);
  } else {
    params.sent = on_sent;
    request = engine_->api().tag_send(link.endpoint, transfer.data, transfer.bytes, link.tag, &params);
  }
  if (request == nullptr) {
    completed(message, Status::ok);
  } else if (ucx::is_error(request)) {
    completed(message, ucx::status_of(request));
  } else {
    message.request = request;
  }
}

// The callbacks run in UCX's progress or in the call that begins the message.
void UcxTransport::on_sent(ucx::Request*, Status status, void* message) {
  auto& sent = *static_cast<Message*>(message);
  sent.link->owner->completed(sent, status);
}

void UcxTransport::on_received(ucx::Request*, Status status, const ucx::Received* received, void* message) {
  auto& taken = *static_cast<Message*>(message);
  UcxTransport& self = *taken.link->owner;
  if (!self.closing_) {
    const std::size_t wanted = taken.transfer->bytes;
    if (status == Status::ok && received->bytes != wanted) status = Status::message_truncated;
    if (status == Status::message_truncated) {
      self.bad_message_ = Error(Code::collective, "rank " + std::to_string(taken.link->rank) +
                                                      " sent a message of another length than the " +
                                                      std::to_string(wanted) + " expected bytes");
    }
  }
  self.completed(taken, status);
}

void UcxTransport::completed(Message& message, Status status) {
  message.state = status == Status::ok ? State::complete : State::failed;
  if (closing_) return;
  dirty_.push_back(message.link);
  if (status != Status::ok) break_link(*message.link, status);
}

void UcxTransport::on_error(void* link, ucx::Endpoint*, Status status) {
  auto& broken = *static_cast<Link*>(link);
  if (!broken.owner->closing_) broken.owner->break_link(broken, status);
}

void UcxTransport::break_link(Link& link, Status status) {
  if (link.broken) return;
  link.broken = Clock::now();
  link.why = engine_->api().status_string(status);
  troubled_.push_back(&link);
}

bool UcxTransport::settle() {
  bool moved = false;
  for (Link* link : dirty_) moved |= settle(*link);
  std::erase_if(dirty_, [](const Link* link) {
    return link->messages.empty() || link->messages.front().state != State::complete;
  });
  return moved;
}

// Marks complete messages as done, in order.
bool UcxTransport::settle(Link& link) {
  bool moved = false;
  while (!link.messages.empty() && link.messages.front().state == State::complete) {
    if (pending_ == 1 && flushed_ != posted_) break;
    Message& message = link.messages.front();
    if (message.request != nullptr) engine_->api().request_free(message.request);
    message.transfer->moved = message.transfer->bytes;
    message.transfer->done = true;
    if (!link.incoming) sent_ += message.transfer->bytes;
    link.messages.pop_front();
    ++link.done;
    --pending_;
    moved = true;
  }
  return moved;
}

// If only one message is not done and UCX has completed it, flushes the worker, so that settle() can mark it as done.
void UcxTransport::release_last() {
  if (pending_ != 1 || dirty_.empty() || flushing_ != 0) return;
  CallParams params = params_of(this);
  params.mask &= ~CallParams::kMemoryType;
  params.sent = on_flushed;
  flushing_ = posted_;
  ucx::Request* request = engine_->api().worker_flush(engine_->worker(), &params);
  if (request == nullptr || ucx::is_error(request)) on_flushed(nullptr, Status::ok, this);
}

// Also called if the flush failed: some links are broken then, and report that themselves.
void UcxTransport::on_flushed(ucx::Request* request, Status, void* transport) {
  auto& self = *static_cast<UcxTransport*>(transport);
  if (request != nullptr && self.engine_ != nullptr) self.engine_->api().request_free(request);
  self.flushed_ = self.flushing_;
  self.flushing_ = 0;
}

// ---- Progress ---------------------------------------------------------------------------------

bool UcxTransport::progress() {
  const std::lock_guard lock(work_mutex_);
  check();
  bool moved = engine_->progress();
  if (!moved) {
    for (Link* link : troubled_) look_after(*link);
    moved = poll(0, false);
  }
  moved |= settle();
  release_last();
  moved |= settle();
  if (bad_message_) fail(*bad_message_);
  return moved;
}

// Throws if an awaited message of an ended or broken link will never arrive. REQUIRES: UCX is idle, so that everything
// that arrived before the end has been received.
void UcxTransport::look_after(Link& link) {
  if (!lost(link)) return;
  if (link.line.ended()) fail(left(link.rank));
  if (Clock::now() - *link.broken < kBrokenGrace) return;
  fail(Error(Code::rank_failed,
             "the UCX connection with rank " + std::to_string(link.rank) + " failed: " + link.why +
                 (link.incoming || link.endpoint ? "" : " (see UCX_TLS and UCX_NET_DEVICES)"),
             link.rank));
}

// Returns whether a message will never be done. Messages that the other side had completed when it left are complete
// here too, or will arrive.
bool UcxTransport::lost(Link& link) {
  const std::uint64_t promised = link.line.promised().value_or(0);
  std::uint64_t number = link.done;
  for (Message& message : link.messages) {
    if (message.state == State::failed && !link.incoming && number < promised) {
      message.state = State::complete;  // the receiver has it; only UCX's confirmation failed
      dirty_.push_back(&link);
    }
    const bool comes = message.state != State::failed && number < promised;
    if (message.state != State::complete && !comes) return true;
    ++number;
  }
  return false;
}

void UcxTransport::wait(std::chrono::milliseconds limit) {
  const std::lock_guard lock(work_mutex_);
  check();
  if (!engine_->arm()) return;
  const bool impatient = std::any_of(troubled_.begin(), troubled_.end(), [this](Link* l) { return lost(*l); });
  poll(static_cast<int>(impatient ? std::min<std::int64_t>(limit.count(), 50) : limit.count()), true);
}

}  // namespace ff::hfreduce

// A session of libfuse: each request of the kernel becomes a call of the Handler, each answer a reply.
//
// The only file that needs libfuse. It is a separate library, loaded by `open_session`, so that the module works where
// libfuse is missing.
#define FUSE_USE_VERSION 35
#include <fcntl.h>
#include <fuse3/fuse_lowlevel.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fs3/mount/requests.hpp"

namespace ff::fs3::mount {

namespace {

constexpr std::size_t kRequestBytes = 1 << 20;
constexpr std::int64_t kSecond = 1'000'000'000;

struct Mounted {
  Handler* handler;
  Options options;
  fuse_session* session = nullptr;
};

struct OpenedFile {
  std::shared_ptr<FileState> file;
};

// The names of an open directory that were fetched so far.
struct OpenedDirectory {
  std::mutex mutex;  // guards the members below
  std::vector<Entry> entries;
  bool complete = false;
};

const Mounted& mounted(fuse_req_t req) { return *static_cast<const Mounted*>(fuse_req_userdata(req)); }

Request request_of(fuse_req_t req, const char* op, fuse_ino_t inode, const char* name = "") {
  const fuse_ctx* const caller = fuse_req_ctx(req);
  Request request{.op = op, .inode = inode};
  request.name = name;
  request.caller_uid = caller->uid;
  request.caller_gid = caller->gid;
  request.caller_pid = caller->pid;
  return request;
}

Answer ask(fuse_req_t req, const Request& request) { return mounted(req).handler->call(request); }

timespec time_of(std::int64_t ns) {
  std::int64_t seconds = ns / kSecond, rest = ns % kSecond;
  if (rest < 0) {
    --seconds;
    rest += kSecond;
  }
  return {.tv_sec = seconds, .tv_nsec = rest};
}

std::int64_t ns_of(const timespec& time) { return std::int64_t{time.tv_sec} * kSecond + time.tv_nsec; }

struct stat stat_of(const Attributes& from) {
  struct stat to = {};
  to.st_ino = from.inode;
  to.st_mode = from.mode;
  to.st_nlink = from.nlink;
  to.st_uid = from.uid;
  to.st_gid = from.gid;
  to.st_size = from.size;
  to.st_blksize = from.block;
  to.st_rdev = from.device;
  to.st_blocks = (from.size + 511) / 512;
  to.st_atim = time_of(from.atime);
  to.st_mtim = time_of(from.mtime);
  to.st_ctim = time_of(from.ctime);
  return to;
}

fuse_entry_param entry_of(const Mounted& mount, const Attributes& from) {
  fuse_entry_param entry = {};
  entry.ino = from.inode;
  entry.attr = stat_of(from);
  entry.attr_timeout = entry.entry_timeout = std::max(0.0, mount.options.attributes_s - from.age_s);
  return entry;
}

void reply_error(fuse_req_t req, const Answer& answer) { fuse_reply_err(req, answer.error); }

void reply_entry(fuse_req_t req, const Answer& answer) {
  if (answer.error != 0) return reply_error(req, answer);
  const fuse_entry_param entry = entry_of(mounted(req), answer.attributes);
  fuse_reply_entry(req, &entry);
}

void reply_attributes(fuse_req_t req, const Answer& answer) {
  if (answer.error != 0) return reply_error(req, answer);
  const struct stat attributes = stat_of(answer.attributes);
  fuse_reply_attr(req, &attributes, std::max(0.0, mounted(req).options.attributes_s - answer.attributes.age_s));
}

void reply_bytes(fuse_req_t req, const Answer& answer, std::size_t size) {  // size 0: only the attribute's length
  if (answer.error != 0) return reply_error(req, answer);
  if (size == 0) {
    fuse_reply_xattr(req, answer.bytes.size());
  } else if (answer.bytes.size() > size) {
    fuse_reply_err(req, ERANGE);
  } else {
    fuse_reply_buf(req, answer.bytes.data(), answer.bytes.size());
  }
}

// Names and attributes

void lookup(fuse_req_t req, fuse_ino_t parent, const char* name) {
  reply_entry(req, ask(req, request_of(req, "lookup", parent, name)));
}

void forget(fuse_req_t req, fuse_ino_t, std::uint64_t) { fuse_reply_none(req); }

void forget_multi(fuse_req_t req, std::size_t, fuse_forget_data*) { fuse_reply_none(req); }

void getattr(fuse_req_t req, fuse_ino_t inode, fuse_file_info*) {
  reply_attributes(req, ask(req, request_of(req, "getattr", inode)));
}

void setattr(fuse_req_t req, fuse_ino_t inode, struct stat* to, int valid, fuse_file_info*) {
  Request request = request_of(req, "setattr", inode);
  request.flags = static_cast<std::uint32_t>(valid);
  request.mode = to->st_mode;
  request.size = to->st_size;
  request.uid = (valid & FUSE_SET_ATTR_UID) != 0 ? std::int64_t{to->st_uid} : -1;
  request.gid = (valid & FUSE_SET_ATTR_GID) != 0 ? std::int64_t{to->st_gid} : -1;
  request.atime = ns_of(to->st_atim);
  request.mtime = ns_of(to->st_mtim);
  reply_attributes(req, ask(req, request));
}

void readlink(fuse_req_t req, fuse_ino_t inode) {
  const Answer answer = ask(req, request_of(req, "readlink", inode));
  if (answer.error != 0) return reply_error(req, answer);
  fuse_reply_readlink(req, answer.bytes.c_str());
}

void mknod(fuse_req_t req, fuse_ino_t parent, const char* name, mode_t mode, dev_t device) {
  Request request = request_of(req, "mknod", parent, name);
  request.mode = mode;
  request.size = static_cast<std::int64_t>(device);
  reply_entry(req, ask(req, request));
}

void mkdir(fuse_req_t req, fuse_ino_t parent, const char* name, mode_t mode) {
  Request request = request_of(req, "mkdir", parent, name);
  request.mode = mode;
  reply_entry(req, ask(req, request));
}

void unlink(fuse_req_t req, fuse_ino_t parent, const char* name) {
  reply_error(req, ask(req, request_of(req, "unlink", parent, name)));
}

void rmdir(fuse_req_t req, fuse_ino_t parent, const char* name) {
  reply_error(req, ask(req, request_of(req, "rmdir", parent, name)));
}

void symlink(fuse_req_t req, const char* target, fuse_ino_t parent, const char* name) {
  Request request = request_of(req, "symlink", parent, name);
  request.data = target;
  reply_entry(req, ask(req, request));
}

void rename(fuse_req_t req, fuse_ino_t parent, const char* name, fuse_ino_t to, const char* new_name, unsigned flags) {
  Request request = request_of(req, "rename", parent, name);
  request.other = to;
  request.data = new_name;
  request.flags = flags;
  reply_error(req, ask(req, request));
}

void link(fuse_req_t req, fuse_ino_t inode, fuse_ino_t parent, const char* name) {
  Request request = request_of(req, "link", inode, name);
  request.other = parent;
  reply_entry(req, ask(req, request));
}

void statfs(fuse_req_t req, fuse_ino_t inode) {
  const Answer answer = ask(req, request_of(req, "statfs", inode));
  if (answer.error != 0) return reply_error(req, answer);
  struct statvfs found = {};
  found.f_bsize = found.f_frsize = answer.attributes.block;
  found.f_blocks = answer.blocks;
  found.f_bfree = found.f_bavail = answer.free;
  found.f_files = answer.files;
  found.f_ffree = found.f_favail = UINT32_MAX;
  found.f_namemax = 255;
  fuse_reply_statfs(req, &found);
}

// Extended attributes

// True for attributes that the kernel asks for before each write. fs3 has no capabilities and no POSIX ACLs.
bool kernels_own(const char* name) {
  return std::strncmp(name, "security.", 9) == 0 || std::strncmp(name, "system.", 7) == 0;
}

void setxattr(fuse_req_t req, fuse_ino_t inode, const char* name, const char* value, std::size_t size, int flags) {
  if (kernels_own(name)) {
    fuse_reply_err(req, EOPNOTSUPP);
    return;
  }
  Request request = request_of(req, "setxattr", inode, name);
  request.data.assign(value, size);
  request.flags = static_cast<std::uint32_t>(flags);
  reply_error(req, ask(req, request));
}

void getxattr(fuse_req_t req, fuse_ino_t inode, const char* name, std::size_t size) {
  if (kernels_own(name)) {
    fuse_reply_err(req, std::strncmp(name, "system.", 7) == 0 ? EOPNOTSUPP : ENODATA);
    return;
  }
  reply_bytes(req, ask(req, request_of(req, "getxattr", inode, name)), size);
}

void listxattr(fuse_req_t req, fuse_ino_t inode, std::size_t size) {
  reply_bytes(req, ask(req, request_of(req, "listxattr", inode)), size);
}

void removexattr(fuse_req_t req, fuse_ino_t inode, const char* name) {
  reply_error(req, ask(req, request_of(req, "removexattr", inode, name)));
}

// Files

FileState& state_of(const fuse_file_info* info) { return *reinterpret_cast<OpenedFile*>(info->fh)->file; }

void keep(fuse_file_info* info, const Answer& answer) {
  info->fh = reinterpret_cast<std::uint64_t>(new OpenedFile{answer.file});
  info->keep_cache = answer.keep ? 1 : 0;
}

// Closes an open file whose reply did not arrive: the kernel sends no RELEASE for it.
void give_back(const Mounted& mount, fuse_ino_t inode, const fuse_file_info* info) {
  const std::unique_ptr<OpenedFile> opened(reinterpret_cast<OpenedFile*>(info->fh));
  mount.handler->call({.op = "release", .inode = inode, .flags = static_cast<std::uint32_t>(info->flags)});
}

void open(fuse_req_t req, fuse_ino_t inode, fuse_file_info* info) {
  Request request = request_of(req, "open", inode);
  request.flags = static_cast<std::uint32_t>(info->flags);
  const Answer answer = ask(req, request);
  if (answer.error != 0) return reply_error(req, answer);
  keep(info, answer);
  const Mounted& mount = mounted(req);
  // Drops the attributes that the kernel has cached, because the file's length may have changed.
  if (!answer.keep) fuse_lowlevel_notify_inval_inode(mount.session, inode, -1, 0);
  if (fuse_reply_open(req, info) == -ENOENT) give_back(mount, inode, info);
}

void create(fuse_req_t req, fuse_ino_t parent, const char* name, mode_t mode, fuse_file_info* info) {
  Request request = request_of(req, "create", parent, name);
  request.flags = static_cast<std::uint32_t>(info->flags);
  request.mode = mode;
  const Answer answer = ask(req, request);
  if (answer.error != 0) return reply_error(req, answer);
  keep(info, answer);
  const Mounted& mount = mounted(req);
  const fuse_entry_param entry = entry_of(mount, answer.attributes);
  if (fuse_reply_create(req, &entry, info) == -ENOENT) give_back(mount, entry.ino, info);
}

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using PageAligned = std::unique_ptr<std::byte[], Free>;

// Allocates page-aligned memory, because the kernel copies between equally aligned pages fastest.
PageAligned page_aligned(std::size_t bytes) {
  constexpr std::size_t kAlignment = 4096;
  PageAligned memory(static_cast<std::byte*>(std::aligned_alloc(kAlignment, bytes)));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void read(fuse_req_t req, fuse_ino_t, std::size_t size, off_t offset, fuse_file_info* info) {
  static thread_local const PageAligned memory = page_aligned(kRequestBytes);
  const std::span<std::byte> buffer(memory.get(), std::min(size, kRequestBytes));
  const std::int64_t count = mounted(req).handler->read(state_of(info), offset, buffer, fuse_req_ctx(req)->pid);
  if (count < 0) {
    fuse_reply_err(req, static_cast<int>(-count));
  } else {
    fuse_reply_buf(req, reinterpret_cast<const char*>(buffer.data()), static_cast<std::size_t>(count));
  }
}

void write(fuse_req_t req, fuse_ino_t, const char* bytes, std::size_t size, off_t offset, fuse_file_info* info) {
  const std::span<const std::byte> data(reinterpret_cast<const std::byte*>(bytes), size);
  const std::int64_t count = mounted(req).handler->write(state_of(info), offset, data, fuse_req_ctx(req)->pid);
  if (count < 0) {
    fuse_reply_err(req, static_cast<int>(-count));
  } else {
    fuse_reply_write(req, static_cast<std::size_t>(count));
  }
}

void report(fuse_req_t req, const char* op, fuse_ino_t inode, const fuse_file_info* info) {
  if (state_of(info).written == kClean) {
    fuse_reply_err(req, 0);
    return;
  }
  reply_error(req, ask(req, request_of(req, op, inode)));
}

void flush(fuse_req_t req, fuse_ino_t inode, fuse_file_info* info) { report(req, "flush", inode, info); }

void fsync(fuse_req_t req, fuse_ino_t inode, int, fuse_file_info* info) { report(req, "fsync", inode, info); }

void release(fuse_req_t req, fuse_ino_t inode, fuse_file_info* info) {
  const std::unique_ptr<OpenedFile> opened(reinterpret_cast<OpenedFile*>(info->fh));
  Request request = request_of(req, "release", inode);
  request.flags = static_cast<std::uint32_t>(info->flags);
  reply_error(req, ask(req, request));
}

void fallocate(fuse_req_t req, fuse_ino_t inode, int mode, off_t offset, off_t length, fuse_file_info*) {
  Request request = request_of(req, "fallocate", inode);
  request.flags = static_cast<std::uint32_t>(mode);
  request.offset = offset;
  request.size = length;
  reply_error(req, ask(req, request));
}

// Directories

void opendir(fuse_req_t req, fuse_ino_t, fuse_file_info* info) {
  auto* const opened = new OpenedDirectory;
  info->fh = reinterpret_cast<std::uint64_t>(opened);
  if (fuse_reply_open(req, info) == -ENOENT) delete opened;
}

void releasedir(fuse_req_t req, fuse_ino_t, fuse_file_info* info) {
  delete reinterpret_cast<OpenedDirectory*>(info->fh);
  fuse_reply_err(req, 0);
}

// Does nothing, because a change of names is durable before its reply.
void fsyncdir(fuse_req_t req, fuse_ino_t, int, fuse_file_info*) { fuse_reply_err(req, 0); }

// Fetches entries up to index `upto`; returns an errno or 0. REQUIRES: the directory's mutex.
int fetch(fuse_req_t req, fuse_ino_t inode, OpenedDirectory& directory, std::size_t upto) {
  while (!directory.complete && directory.entries.size() <= upto) {
    Request request = request_of(req, "readdir", inode);
    if (!directory.entries.empty()) request.name = directory.entries.back().name;
    Answer answer = ask(req, request);
    if (answer.error != 0) return answer.error;
    directory.complete = answer.entries.size() < Handler::kPage;
    for (Entry& entry : answer.entries) directory.entries.push_back(std::move(entry));
  }
  return 0;
}

// Fills `buffer` with entries from `offset` on; returns the bytes used, or a negative errno.
std::int64_t fill(fuse_req_t req, fuse_ino_t inode, OpenedDirectory& directory, std::span<char> buffer, off_t offset,
                  bool plus) {
  constexpr const char* kDots[] = {".", ".."};
  const std::lock_guard lock(directory.mutex);
  if (offset == 0) {  // also after rewinddir, which must show changes
    directory.entries.clear();
    directory.complete = false;
  }
  std::size_t used = 0;
  for (auto at = static_cast<std::size_t>(offset);; ++at) {
    fuse_entry_param entry = {};
    const char* name = nullptr;
    if (at < 2) {  // `ino` 0: the kernel does not cache this entry
      name = kDots[at];
      entry.attr.st_ino = inode;
      entry.attr.st_mode = S_IFDIR;
    } else {
      if (const int error = fetch(req, inode, directory, at - 2); error != 0 && used == 0) return -error;
      if (at - 2 >= directory.entries.size()) break;
      name = directory.entries[at - 2].name.c_str();
      entry = entry_of(mounted(req), directory.entries[at - 2].attributes);
    }
    char* const to = buffer.data() + used;
    const std::size_t left = buffer.size() - used;
    const auto next = static_cast<off_t>(at + 1);
    const std::size_t needed = plus ? fuse_add_direntry_plus(req, to, left, name, &entry, next)
                                    : fuse_add_direntry(req, to, left, name, &entry.attr, next);
    if (needed > left) break;
    used += needed;
  }
  return static_cast<std::int64_t>(used);
}

// The directory is not accessed after the reply, because a RELEASEDIR may follow the reply at once.
void list(fuse_req_t req, fuse_ino_t inode, std::size_t size, off_t offset, fuse_file_info* info, bool plus) {
  std::vector<char> buffer(size);
  const std::int64_t used = fill(req, inode, *reinterpret_cast<OpenedDirectory*>(info->fh), buffer, offset, plus);
  if (used < 0) {
    fuse_reply_err(req, static_cast<int>(-used));
  } else {
    fuse_reply_buf(req, buffer.data(), static_cast<std::size_t>(used));
  }
}

void readdir(fuse_req_t req, fuse_ino_t inode, std::size_t size, off_t offset, fuse_file_info* info) {
  list(req, inode, size, offset, info, false);
}

void readdirplus(fuse_req_t req, fuse_ino_t inode, std::size_t size, off_t offset, fuse_file_info* info) {
  list(req, inode, size, offset, info, true);
}

void init(void*, fuse_conn_info* connection) {
  connection->max_write = connection->max_read = connection->max_readahead = kRequestBytes;
  unsigned unwanted = FUSE_CAP_SPLICE_READ | FUSE_CAP_SPLICE_WRITE | FUSE_CAP_WRITEBACK_CACHE;
  // With this capability the kernel looks names up one by one from the second page of a directory on.
  unwanted |= FUSE_CAP_READDIRPLUS_AUTO;
  connection->want &= ~unwanted;
  connection->want |= connection->capable & FUSE_CAP_PARALLEL_DIROPS;
}

// Without flock, getlk and setlk the kernel keeps locks itself, between the processes of one mount.
fuse_lowlevel_ops operations() {
  fuse_lowlevel_ops ops = {};
  ops.init = init;
  ops.lookup = lookup;
  ops.forget = forget;
  ops.forget_multi = forget_multi;
  ops.getattr = getattr;
  ops.setattr = setattr;
  ops.readlink = readlink;
  ops.mknod = mknod;
  ops.mkdir = mkdir;
  ops.unlink = unlink;
  ops.rmdir = rmdir;
  ops.symlink = symlink;
  ops.rename = rename;
  ops.link = link;
  ops.open = open;
  ops.read = read;
  ops.write = write;
  ops.flush = flush;
  ops.release = release;
  ops.fsync = fsync;
  ops.opendir = opendir;
  ops.readdir = readdir;
  ops.releasedir = releasedir;
  ops.fsyncdir = fsyncdir;
  ops.statfs = statfs;
  ops.setxattr = setxattr;
  ops.getxattr = getxattr;
  ops.listxattr = listxattr;
  ops.removexattr = removexattr;
  ops.create = create;
  ops.fallocate = fallocate;
  ops.readdirplus = readdirplus;
  return ops;
}

// Escapes the value of a mount option, because libfuse splits options at commas.
std::string escaped(const std::string& value) {
  std::string result;
  for (const char c : value) {
    if (c == ',' || c == '\\') result += '\\';
    result += c;
  }
  return result;
}

class FuseSession final : public Session {
 public:
  FuseSession(Handler* handler, const Options& options) : mounted_{handler, options, nullptr} {}
  ~FuseSession() override {
    if (session_ == nullptr) return;
    if (there_) fuse_session_unmount(session_);
    fuse_session_destroy(session_);
  }

  bool mount(const char* directory) {
    std::string set = "default_permissions,subtype=fireflyer,max_read=" + std::to_string(kRequestBytes);
    set += ",fsname=" + escaped(mounted_.options.source);
    if (mounted_.options.others) set += ",allow_other";
    std::string program = "fireflyer", flag = "-o";
    char* words[] = {program.data(), flag.data(), set.data(), nullptr};
    fuse_args args = {.argc = 3, .argv = words, .allocated = 0};
    const fuse_lowlevel_ops ops = operations();
    session_ = mounted_.session = fuse_session_new(&args, &ops, sizeof ops, &mounted_);
    there_ = session_ != nullptr && fuse_session_mount(session_, directory) == 0;
    return there_;
  }

  void work() noexcept override {
    fuse_buf buffer = {};
    while (fuse_session_exited(session_) == 0) {
      const int count = fuse_session_receive_buf(session_, &buffer);
      if (count == -EINTR) continue;
      if (count <= 0) break;
      fuse_session_process_buf(session_, &buffer);
    }
    std::free(buffer.mem);
  }

  void stop() noexcept override { fuse_session_exit(session_); }

 private:
  Mounted mounted_;
  fuse_session* session_ = nullptr;
  bool there_ = false;
};

}  // namespace

}  // namespace ff::fs3::mount

// Returns a mounted session that the caller deletes. Returns null on failure; libfuse has printed the reason to stderr.
extern "C" __attribute__((visibility("default"))) ff::fs3::mount::Session* ff_open_fuse_session(
    const char* directory, ff::fs3::mount::Handler* handler, const ff::fs3::mount::Options* options) {
  auto session = std::make_unique<ff::fs3::mount::FuseSession>(handler, *options);
  return session->mount(directory) ? session.release() : nullptr;
}

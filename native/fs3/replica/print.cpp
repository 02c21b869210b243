#include "fs3/replica/print.hpp"

#include <sstream>
#include <type_traits>

namespace ff::fs3::replica {

const char* name(State state) {
  constexpr const char* kNames[] = {"SERVING", "RECOVERING", "LASTSRV", "SYNCING", "WAITING", "OFFLINE"};
  return kNames[static_cast<int>(state)];
}

const char* name(Local local) {
  constexpr const char* kNames[] = {"ONLINE", "UPTODATE", "FAULTY"};
  return kNames[static_cast<int>(local)];
}

const char* name(Kind kind) {
  constexpr const char* kNames[] = {"write", "truncate", "extend", "remove", "replace"};
  return kNames[static_cast<int>(kind)];
}

const char* name(Status status) {
  constexpr const char* kNames[] = {"ok",       "stale_routing", "duplicate", "diverged", "corrupt",
                                    "no_space", "io_error",      "not_found", "invalid"};
  return kNames[static_cast<int>(status)];
}

std::string to_string(const ChunkId& chunk) { return std::to_string(chunk.inode) + "." + std::to_string(chunk.index); }

namespace {

std::string tag_of(const Tag& tag) {
  if (tag.client == 0) return "";
  return " tag " + std::to_string(tag.client) + "/" + std::to_string(tag.channel) + "#" + std::to_string(tag.seq);
}

std::string bytes_of(Payload payload) { return payload == 0 ? "" : " payload " + std::to_string(payload); }

std::string range_of(Kind kind, std::uint32_t offset, std::uint32_t length) {
  if (kind == Kind::write) return " at " + std::to_string(offset) + "+" + std::to_string(length);
  if (kind == Kind::truncate || kind == Kind::extend) return " to " + std::to_string(length);
  return "";
}

struct Printer {
  std::ostringstream out;

  template <class M>
  void head(const char* what, const M& m) {
    out << what << " " << m.op << " from " << m.from << " at " << m.chain_version;
  }
  void entry(const Entry& e) {
    out << to_string(e.chunk) << " v" << e.committed;
    if (e.pending != 0) out << (e.removes ? "-v" : "+v") << e.pending;
  }

  void operator()(const Routing& r) {
    out << "Routing " << r.version << ":";
    for (const Member& m : r.members) out << " " << m.target << "=" << name(m.state) << "/" << m.incarnation;
  }
  void operator()(const Lease& l) {
    out << "Lease " << (l.runs ? "runs" : "ended");
    if (l.runs && l.version != 0) out << " at " << l.version;
  }
  void operator()(const ClientWrite& w) {
    out << "ClientWrite " << w.op << " at " << w.chain_version << " " << name(w.kind) << " " << to_string(w.chunk)
        << range_of(w.kind, w.offset, w.length) << tag_of(w.tag) << bytes_of(w.payload);
  }
  void operator()(const Read& r) {
    out << "Read " << r.op << " at " << r.chain_version << " " << to_string(r.chunk)
        << (r.allow_uncommitted ? " uncommitted too" : "");
  }
  void operator()(const Damaged& d) { out << "Damaged " << to_string(d.chunk); }
  void operator()(const Applied& a) { out << "Applied " << a.op << " " << name(a.status); }
  void operator()(const SendFailed& f) { out << "SendFailed " << f.op << " " << name(f.status); }
  void operator()(const Retry& r) { out << "Retry " << r.op; }
  void operator()(const Update& u) {
    head("Update", u);
    out << (u.forget ? " forget " : " ") << (u.forget ? "" : name(u.kind)) << (u.forget ? "" : " ")
        << to_string(u.chunk) << " v" << u.version << " on v" << u.base << range_of(u.kind, u.offset, u.length)
        << tag_of(u.tag) << bytes_of(u.payload);
  }
  void operator()(const Answer& a) {
    head("Answer", a);
    out << " " << name(a.status);
  }
  void operator()(const PageAsk& a) {
    head("PageAsk", a);
    out << " after " << to_string(a.after);
  }
  void operator()(const Page& p) {
    head("Page", p);
    out << " floor " << p.floor << " [";
    for (const Entry& e : p.entries) {
      if (&e != p.entries.data()) out << ", ";
      entry(e);
    }
    out << (p.more ? ", ...]" : "]");
  }
  void operator()(const SyncDone& d) {
    head("SyncDone", d);
    out << " floor " << d.floor << bytes_of(d.payload);
  }
  void operator()(const Fetch& f) {
    head("Fetch", f);
    out << " " << to_string(f.chunk) << " v" << f.version << (f.as_is ? " as is" : "");
  }
  void operator()(const Fetched& f) {
    head("Fetched", f);
    out << " " << to_string(f.chunk) << " v" << f.version << " " << name(f.status) << bytes_of(f.payload);
  }
  void operator()(const TagsAsk& a) { head("TagsAsk", a); }
  void operator()(const Tags& t) {
    head("Tags", t);
    out << " floor " << t.floor << bytes_of(t.payload);
  }

  void operator()(const Apply& a) {
    out << "Apply " << a.op << " " << name(a.kind) << " " << to_string(a.chunk) << " v" << a.version << " on ";
    if (a.any_base) {
      out << "anything";
    } else {
      out << "v" << a.base;
    }
    out << range_of(a.kind, a.offset, a.length) << (a.committed ? " committed" : " pending") << tag_of(a.tag)
        << bytes_of(a.payload);
  }
  void operator()(const Commit& c) { out << "Commit " << to_string(c.chunk) << " v" << c.version; }
  void operator()(const Drop& d) { out << "Drop " << d.op << " " << to_string(d.chunk) << " v" << d.version; }
  void operator()(const Mark&) { out << "Mark"; }
  void operator()(const Conclude& c) { out << "Conclude " << c.op << " floor " << c.floor << bytes_of(c.payload); }
  void operator()(const Send& s) {
    out << "Send to " << s.to << ": " << to_string(s.message) << (s.as_is ? " (as is)" : "");
  }
  void operator()(const Reply& r) {
    out << "Reply " << r.op << " " << name(r.status);
    if (r.version != 0) out << " v" << r.version << " length " << r.length;
  }
  void operator()(const ServeRead& r) { out << "ServeRead " << r.op << " " << to_string(r.chunk) << " v" << r.version; }
  void operator()(const Pause& p) { out << "Pause " << p.op; }
  void operator()(const LocalState& l) {
    out << "LocalState " << name(l.state);
    if (l.state == Local::uptodate) out << " at " << l.version;
  }
  void operator()(const Release& r) { out << "Release" << bytes_of(r.payload); }
  void operator()(const Unrepairable& u) { out << "Unrepairable " << to_string(u.chunk) << " v" << u.version; }
};

template <class V>
std::string print(const V& variant) {
  Printer printer;
  std::visit(printer, variant);
  return printer.out.str();
}

}  // namespace

std::string to_string(const Event& event) { return print(event); }
std::string to_string(const Message& message) { return print(message); }
std::string to_string(const Action& action) { return print(action); }

}  // namespace ff::fs3::replica

// The one error type of the native code. The outermost function of a native thread catches the error and stores it in
// the operation that failed. bind.cpp turns the error's code into an exception class of Python.
#pragma once

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace ff {

enum class Code {
  invalid,            // ValueError: the caller's argument
  corrupted,          // errors.Corrupted
  no_space,           // errors.NoSpace
  storage,            // errors.StorageError
  peer_lost,          // errors.PeerLost
  deadline_exceeded,  // errors.DeadlineExceeded
  collective,         // errors.CollectiveError
  rank_failed,        // errors.RankFailed(rank)
  cancelled,          // errors.Cancelled
  late,               // like rank_failed, but the rank may itself be waiting for another rank
};

class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& message, int rank = -1) : std::runtime_error(message), code_(code), rank_(rank) {}
  Code code() const { return code_; }
  int rank() const { return rank_; }  // the rank to blame; set for Code::rank_failed and late, otherwise it may be -1

 private:
  Code code_;
  int rank_;
};

// Throws an Error with the text "<what>: <strerror>": Code::no_space for ENOSPC, EDQUOT and ENOMEM, otherwise
// Code::storage.
[[noreturn]] inline void throw_errno(const std::string& what, int error = errno) {
  const bool full = error == ENOSPC || error == EDQUOT || error == ENOMEM;
  throw Error(full ? Code::no_space : Code::storage, what + ": " + std::strerror(error));
}

}  // namespace ff

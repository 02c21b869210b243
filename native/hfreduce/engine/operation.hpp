// One submitted call: the memory it works on, and its completion.
//
// Shared by the submitter, which waits, and the engine, which completes it once.
// Thread contract: wait(), done() and rethrow() may be called from any thread.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>

#include "base/error.hpp"
#include "hfreduce/host/shared_result.hpp"
#include "hfreduce/types.hpp"

namespace ff::hfreduce {

class Staging;  // stager.hpp

// The call and the memory it works on. Pieces are by rank of the group:
//   allreduce       in: the tensor                out: the same tensor; none if the result is shared
//   reduce_scatter  in: a piece per rank          out: one piece
//   all_gather      in: one piece                 out: a piece per rank
//   broadcast       in (root) / out (other ranks): the tensor
//   reduce          in: the tensor                out (root): the tensor
//   gather          in: one piece                 out (root): a piece per rank
//   scatter         in (root): a piece per rank   out: one piece
//   all_to_all      in: a piece per rank          out: a piece per rank
// Inputs are only read, except by allreduce and by reduce at the root, which work in place.
struct Request {
  Call call;
  Pieces in, out;
  int priority = 0;                            // higher first; 0: in the order of submission
  float* residual = nullptr;                   // error feedback of the wire codec: a float per element
  std::uint64_t seed = 0;                      // of stochastic rounding on the wire; 0: rounds to nearest
  double timeout_s = 0;                        // of this call, from the start of its turn; 0: the group's
  std::shared_ptr<Staging> staging = nullptr;  // for a call on device memory, whose pieces are mirrors
};

class Operation {
 public:
  explicit Operation(Request what) : request(std::move(what)) {}
  Operation() = default;

  // Returns true when the operation is over, false after `seconds` (< 0: no limit).
  bool wait(double seconds);
  bool done();
  void rethrow();  // REQUIRES: done. Throws the error of the operation, if any
  void complete(std::optional<Error> error);

  Request request;
  std::uint64_t number = 0;              // in the order of submission to its group
  bool withdrawn = false;                // used by the engine: the operation ends as cancelled instead of running
  std::shared_ptr<SharedResult> shared;  // result of a call with `shared`, once it is over
  int source = -1;                       // for receives from any source: the sender's rank, once the operation is over

 private:
  std::mutex mutex_;
  std::condition_variable over_;
  bool done_ = false;
  std::optional<Error> error_;
};

}  // namespace ff::hfreduce

// Collectives of MPI, timed on command: the peer of `fireflyer bench NAME --against mpi`.
//
//   mpirun -n N mpi_collectives FOLDER
//
// Every rank reads the same lines from its own named pipe FOLDER/RANK, so that between two commands it sleeps in
// read() and leaves the cores to others. Rank 0 answers each command with one line in FOLDER/answer:
//
//   hello                              ready
//   run NAME TYPE OP BYTES CALLS       seconds from the first rank's begin to the last one's end, and CPU seconds
//                                      of all ranks together, for all CALLS
//   check NAME TYPE OP BYTES 1         elements with a wrong value, of all ranks together
//
// TYPE and OP are those of the reducing collectives; the others move bytes and take "uint8". End of file on the
// pipe ends the program. Sizes and check values are those of src/fireflyer/bench/collectives/cases.py.
#define _POSIX_C_SOURCE 200809L
#include <limits.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { kPeriod = 1009, kShift = 131 };

static int rank, ranks;

static void fail(const char* what, const char* which) {
  fprintf(stderr, "mpi_collectives: rank %d: %s %s\n", rank, what, which);
  MPI_Abort(MPI_COMM_WORLD, 1);
  exit(1);
}

// ---- element types

typedef struct {
  const char* name;
  size_t size;
  MPI_Datatype type;
} Type;

static Type find_type(const char* name) {
  const Type types[] = {
      {"float32", 4, MPI_FLOAT},  {"float64", 8, MPI_DOUBLE},  {"int64", 8, MPI_INT64_T},
      {"int32", 4, MPI_INT32_T},  {"uint8", 1, MPI_UINT8_T},
  };
  for (size_t i = 0; i < sizeof types / sizeof *types; ++i)
    if (strcmp(types[i].name, name) == 0) return types[i];
  fail("no type", name);
  return types[0];
}

static void store(char* at, const Type* t, double value) {
  if (t->type == MPI_FLOAT) *(float*)at = (float)value;
  else if (t->type == MPI_DOUBLE) *(double*)at = value;
  else if (t->type == MPI_INT64_T) *(int64_t*)at = (int64_t)value;
  else if (t->type == MPI_INT32_T) *(int32_t*)at = (int32_t)value;
  else *(uint8_t*)at = (uint8_t)value;
}

static double load(const char* at, const Type* t) {
  if (t->type == MPI_FLOAT) return *(const float*)at;
  if (t->type == MPI_DOUBLE) return *(const double*)at;
  if (t->type == MPI_INT64_T) return (double)*(const int64_t*)at;
  if (t->type == MPI_INT32_T) return *(const int32_t*)at;
  return *(const uint8_t*)at;
}

// ---- operations

typedef enum { kSum, kMin, kMax, kProduct, kAnd, kOr, kXor, kOps } Op;
static const char* const kOpNames[kOps] = {"sum", "min", "max", "product", "band", "bor", "bxor"};

static MPI_Op mpi_op(Op op) {
  const MPI_Op ops[kOps] = {MPI_SUM, MPI_MIN, MPI_MAX, MPI_PROD, MPI_BAND, MPI_BOR, MPI_BXOR};
  return ops[op];
}

static Op find_op(const char* name) {
  for (int i = 0; i < kOps; ++i)
    if (strcmp(kOpNames[i], name) == 0) return (Op)i;
  fail("no operation", name);
  return kSum;
}

static int bit(size_t index, int of_rank) {
  const size_t j = (index + (size_t)kShift * (size_t)of_rank) % kPeriod;
  return (int)(j * j % 11 & 1);
}

static double reduced(Op op, size_t index) {
  int sum = 0;
  double product = 1;
  for (int r = 0; r < ranks; ++r) {
    sum += bit(index, r);
    product *= 1 + bit(index, r);
  }
  switch (op) {
    case kProduct: return product;
    case kMin: case kAnd: return sum == ranks;
    case kMax: case kOr: return sum > 0;
    case kXor: return sum % 2;
    default: return sum;
  }
}

// ---- collectives

typedef enum {
  kAllreduce, kAllgather, kReduceScatter, kBroadcast, kReduce, kAlltoall, kSendrecv, kBarrier, kNames
} Name;
static const char* const kNameTexts[kNames] = {
    "allreduce", "allgather", "reduce_scatter", "broadcast", "reduce", "alltoall", "sendrecv", "barrier"};

typedef struct {
  Name name;
  Type type;
  Op op;
  size_t whole, part;  // elements of the whole tensor and of one rank's part
  char *in, *out;      // in-place collectives use `in` alone; zeroed when made
  double sums[kPeriod];  // the reduced values of a period
} Call;

static void once(const Call* c) {
  const int whole = (int)c->whole, part = (int)c->part;
  const MPI_Datatype t = c->type.type;
  const MPI_Op op = mpi_op(c->op);
  const MPI_Comm world = MPI_COMM_WORLD;
  switch (c->name) {
    case kAllreduce: MPI_Allreduce(MPI_IN_PLACE, c->in, whole, t, op, world); break;
    case kAllgather: MPI_Allgather(c->in, part, t, c->out, part, t, world); break;
    case kReduceScatter: MPI_Reduce_scatter_block(c->in, c->out, part, t, op, world); break;
    case kBroadcast: MPI_Bcast(c->in, whole, t, 0, world); break;
    case kReduce:
      MPI_Reduce(rank == 0 ? MPI_IN_PLACE : c->in, c->in, whole, t, op, 0, world);
      break;
    case kAlltoall: MPI_Alltoall(c->in, part, t, c->out, part, t, world); break;
    case kSendrecv:
      MPI_Sendrecv(c->in, whole, t, (rank + 1) % ranks, 0, c->out, whole, t, (rank + ranks - 1) % ranks,
                   0, world, MPI_STATUS_IGNORE);
      break;
    default: MPI_Barrier(world);
  }
}

// The wanted value of element i of this rank's output.
static double wanted(const Call* c, size_t i) {
  const size_t mine = (size_t)rank * c->part;
  switch (c->name) {
    case kAllgather: return bit(i % c->part, (int)(i / c->part));
    case kReduceScatter: return c->sums[(mine + i) % kPeriod];
    case kBroadcast: return bit(i, 0);
    case kAlltoall: return bit(mine + i % c->part, (int)(i / c->part));
    case kSendrecv: return bit(i, (rank + ranks - 1) % ranks);
    default: return c->sums[i % kPeriod];
  }
}

static long long check(const Call* c) {
  if (c->name == kBarrier) return 0;
  const int in_place = c->name == kAllreduce || c->name == kBroadcast || c->name == kReduce;
  const int more = c->op == kProduct;
  const size_t inputs = c->name == kAllgather ? c->part : c->whole;
  for (size_t i = 0; i < inputs; ++i)
    store(c->in + i * c->type.size, &c->type, bit(i, rank) + more);
  once(c);
  if (c->name == kReduce && rank != 0) return 0;
  const char* out = in_place ? c->in : c->out;
  const size_t outputs = c->name == kReduceScatter ? c->part : c->whole;
  long long wrong = 0;
  for (size_t i = 0; i < outputs; ++i)
    wrong += load(out + i * c->type.size, &c->type) != wanted(c, i);
  return wrong;
}

static void prepare(Call* c, const char* name, const char* type, const char* op, size_t bytes) {
  free(c->in);
  free(c->out);
  int found = 0;
  while (found < kNames && strcmp(kNameTexts[found], name) != 0) ++found;
  if (found == kNames) fail("no collective", name);
  c->name = (Name)found;
  c->type = find_type(type);
  c->op = find_op(op);
  const size_t n = (size_t)ranks;
  const int split = c->name == kAllgather || c->name == kReduceScatter || c->name == kAlltoall;
  c->whole = bytes / c->type.size > 0 ? bytes / c->type.size : 1;
  c->part = split ? (c->whole / n > 0 ? c->whole / n : 1) : c->whole;
  if (split) c->whole = c->part * n;
  if (c->whole > INT_MAX) fail("too many elements for", name);
  for (size_t i = 0; i < kPeriod; ++i) c->sums[i] = reduced(c->op, i);
  c->in = calloc(c->whole, c->type.size);
  c->out = calloc(c->whole, c->type.size);
  if (c->in == NULL || c->out == NULL) fail("no memory for", name);
  memset(c->in, 0, c->whole * c->type.size);
  memset(c->out, 0, c->whole * c->type.size);
}

// ---- commands

static double seconds(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void run(const Call* c, int calls, FILE* answer) {
  MPI_Barrier(MPI_COMM_WORLD);
  const double begin = seconds(CLOCK_MONOTONIC), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
  for (int i = 0; i < calls; ++i) once(c);
  const double my_cpu = seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
  const double mine[2] = {-begin, seconds(CLOCK_MONOTONIC)};
  double bounds[2] = {0, 0}, together = 0;
  MPI_Reduce(mine, bounds, 2, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  MPI_Reduce(&my_cpu, &together, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
  if (answer != NULL) fprintf(answer, "%.9f %.9f\n", bounds[1] + bounds[0], together);
}

static FILE* open_pipe(const char* folder, const char* name, const char* mode) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE* file = fopen(path, mode);
  if (file == NULL) fail("cannot open", path);
  return file;
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (argc != 2) fail("usage:", "mpi_collectives FOLDER");
  char name[16];
  snprintf(name, sizeof name, "%d", rank);
  FILE* commands = open_pipe(argv[1], name, "r");
  FILE* answer = rank == 0 ? open_pipe(argv[1], "answer", "w") : NULL;

  Call call = {.in = NULL, .out = NULL};
  char line[256], made[256] = "";
  while (fgets(line, sizeof line, commands) != NULL) {
    char verb[16], what[32], type[32], op[32], buffers[256];
    size_t bytes;
    int calls;
    if (strcmp(line, "hello\n") == 0) {
      MPI_Barrier(MPI_COMM_WORLD);
      if (answer != NULL) fprintf(answer, "ready\n");
    } else if (sscanf(line, "%15s %31s %31s %31s %zu %d", verb, what, type, op, &bytes, &calls) == 6) {
      snprintf(buffers, sizeof buffers, "%s %s %s %zu", what, type, op, bytes);
      if (strcmp(buffers, made) != 0) prepare(&call, what, type, op, bytes);
      strcpy(made, buffers);
      if (strcmp(verb, "run") == 0) {
        run(&call, calls, answer);
      } else {
        long long wrong = check(&call), all = 0;
        MPI_Reduce(&wrong, &all, 1, MPI_LONG_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
        if (answer != NULL) fprintf(answer, "%lld\n", all);
        made[0] = '\0';  // timed calls work on zeros
      }
    } else {
      fail("cannot understand", line);
    }
    if (answer != NULL) fflush(answer);
  }
  free(call.in);
  free(call.out);
  MPI_Finalize();
  return 0;
}

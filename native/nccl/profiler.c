// SPDX-License-Identifier: Apache-2.0
// libnccl-profiler-stretto.so: NCCL's profiler plugin, interfaces v4 to v6, which measures what collectives cost.
//
// NCCL loads it with NCCL_PROFILER_PLUGIN (its path, or `stretto` where the loader finds it). For every collective it
// learns the algorithm, protocol and channels that NCCL chose, and from the GPU's own clock when each channel's part of
// the kernel began and ended. Into the folder STRETTO_PROFILE it writes a table for each communicator and rank, in the
// form of `stretto plan --costs`: medians, one line for each kind of call. Without that variable it asks NCCL for no
// events at all. It never fails, and nothing is allocated while collectives run.

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0 };
enum { WARN = 2, INFO = 3, PROFILING = 4096 };
enum { COLLECTIVE = 1 << 1, KERNEL_CHANNEL = 1 << 6, CHANNEL_STOPPED = 22 };
enum { CALLS = 4096, PARTS = 1 << 15, KINDS = 1024, SAMPLES = 64, WRITE_AFTER_S = 5, NAME = 24, MAX_CONTEXTS = 4096 };

typedef void (*Logger)(int level, unsigned long flags, const char* file, int line, const char* format, ...);

// What NCCL passes; in v4 `type` is one byte and the rest of its word is not set.
typedef struct {
  uint64_t type;
  void* parent;
  int rank;
  union {
    struct {
      uint64_t number;
      const char* function;
      const void* send;
      void* receive;
      size_t count;
      int root;
      const char* datatype;
      uint8_t channels;
      uint8_t warps;
      const char* algorithm;
      const char* protocol;
    } collective;
    struct {
      uint8_t channel;
      uint64_t timer;
    } kernel;
  };
} Event;

typedef union {
  struct {
    uint64_t timer;
  } kernel;
} StateArguments;

typedef struct {
  char collective[NAME], algorithm[NAME], protocol[NAME];
  size_t bytes;
  int channels;
  uint64_t calls;
  double us[SAMPLES];  // the latest
} Kind;

typedef struct Context Context;

typedef struct {
  int is_part;
  Context* context;
  int kind, channels, stopped;
  uint64_t serial, begin, end;
} Call;

typedef struct {
  int is_part;
  Call* call;
  uint64_t serial, begin;
} Part;

struct Context {
  pthread_mutex_t lock;
  uint64_t communicator, serial, parts, ended;
  int nodes, ranks, rank, kinds;
  time_t written;
  Logger log;
  Call calls[CALLS];
  Part part[PARTS];
  Kind kind[KINDS];
};

static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;
static Context* all[MAX_CONTEXTS];

// As a collective of ours is called, and how many of its counts the larger buffer of a rank has; NULL: not measured.
static const char* collective_name(const char* function, int ranks, size_t* times) {
  static const char* const NAMES[][2] = {{"AllReduce", "all_reduce"}, {"AllGather", "all_gather"},
                                         {"ReduceScatter", "reduce_scatter"}, {"Broadcast", "broadcast"},
                                         {"Reduce", "reduce"}};
  for (int i = 0; function && i < 5; ++i)
    if (strcmp(function, NAMES[i][0]) == 0) {
      *times = i == 1 || i == 2 ? (size_t)ranks : 1;
      return NAMES[i][1];
    }
  return NULL;
}

// Of "ncclFloat16" and its like: the bits at the end of the name; "ncclFloat8e4m3" has eight.
static size_t bytes_of(const char* datatype) {
  if (!datatype) return 1;
  if (strstr(datatype, "8e") || strstr(datatype, "Char")) return 1;
  if (strstr(datatype, "64") || strstr(datatype, "Double")) return 8;
  if (strstr(datatype, "32")) return 4;
  if (strstr(datatype, "16") || strstr(datatype, "Half")) return 2;
  if (strstr(datatype, "8")) return 1;
  return strstr(datatype, "Int") || strstr(datatype, "Float") ? 4 : 1;
}

static void lowered(char* to, const char* from) {
  size_t i = 0;
  for (; from && from[i] && i + 1 < NAME; ++i) {
    char letter = from[i];
    to[i] = letter >= 'A' && letter <= 'Z' ? (char)(letter + 32) : letter;
    // It must not end a field or a line of the table.
    if (!(to[i] >= 'a' && to[i] <= 'z') && !(to[i] >= '0' && to[i] <= '9')) to[i] = '_';
  }
  to[i] = 0;
}

static int by_size(const void* a, const void* b) {
  double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static double median(const Kind* kind) {
  double sorted[SAMPLES];
  int count = kind->calls < SAMPLES ? (int)kind->calls : SAMPLES;
  memcpy(sorted, kind->us, (size_t)count * sizeof(double));
  qsort(sorted, (size_t)count, sizeof(double), by_size);
  return count % 2 ? sorted[count / 2] : (sorted[count / 2 - 1] + sorted[count / 2]) / 2;
}

// The whole table, under another name first: whoever reads meanwhile sees the one before. The lock is held.
static void write_table(Context* context) {
  const char* folder = getenv("STRETTO_PROFILE");
  context->written = time(NULL);
  if (!folder || !context->ended) return;
  char path[4096], part[4096 + 8], host[128] = "";
  gethostname(host, sizeof host - 1);
  int length = snprintf(path, sizeof path, "%s/nccl-%s-%d-%016llx-%d.csv", folder, host, (int)getpid(),
                        (unsigned long long)context->communicator, context->rank);
  if (length < 0 || (size_t)length >= sizeof path) return;
  snprintf(part, sizeof part, "%s.part", path);
  FILE* file = fopen(part, "w");
  if (!file) {
    if (context->log) context->log(WARN, PROFILING, __FILE__, __LINE__, "stretto: cannot write %s", part);
    return;
  }
  fprintf(file, "collective,algorithm,channels,nranks,nbytes,time_us,protocol,nccl_channels,nodes,calls\n");
  for (int i = 0; i < context->kinds; ++i) {
    const Kind* kind = &context->kind[i];
    if (kind->calls)
      fprintf(file, "%s,nccl_%s,,%d,%zu,%.3f,%s,%d,%d,%llu\n", kind->collective, kind->algorithm, context->ranks,
              kind->bytes, median(kind), kind->protocol, kind->channels, context->nodes,
              (unsigned long long)kind->calls);
  }
  int good = !ferror(file);
  if (fclose(file) == 0 && good) rename(part, path);
}

static int init_v5(void** handle, uint64_t communicator, int* mask, const char* name, int nodes, int ranks, int rank,
                   Logger log) {
  (void)name;
  *mask = 0;
  *handle = NULL;
  if (!getenv("STRETTO_PROFILE") || ranks < 2) {
    if (log && ranks > 1)
      log(INFO, PROFILING, __FILE__, __LINE__, "stretto: STRETTO_PROFILE names no folder; nothing is measured");
    return SUCCESS;
  }
  Context* context = calloc(1, sizeof(Context));
  if (!context) return SUCCESS;
  pthread_mutex_init(&context->lock, NULL);
  context->communicator = communicator;
  context->nodes = nodes;
  context->ranks = ranks;
  context->rank = rank;
  context->log = log;
  context->written = time(NULL);
  pthread_mutex_lock(&all_lock);
  for (int i = 0; i < MAX_CONTEXTS; ++i)
    if (!all[i]) {
      all[i] = context;
      break;
    }
  pthread_mutex_unlock(&all_lock);
  *handle = context;
  *mask = COLLECTIVE | KERNEL_CHANNEL;
  if (log) log(INFO, PROFILING, __FILE__, __LINE__, "stretto: measures into %s", getenv("STRETTO_PROFILE"));
  return SUCCESS;
}

static int init_v4(void** handle, int* mask, const char* name, uint64_t communicator, int nodes, int ranks, int rank,
                   Logger log) {
  return init_v5(handle, communicator, mask, name, nodes, ranks, rank, log);
}

// The number of a kind of call; -1 where there is no room for another.
static int kind_of(Context* context, const char* collective, size_t bytes, const Event* event) {
  Kind made = {0};
  snprintf(made.collective, NAME, "%s", collective);
  lowered(made.algorithm, event->collective.algorithm);
  lowered(made.protocol, event->collective.protocol);
  made.bytes = bytes;
  made.channels = event->collective.channels;
  for (int i = 0; i < context->kinds; ++i) {
    const Kind* kind = &context->kind[i];
    if (kind->bytes == made.bytes && kind->channels == made.channels && !strcmp(kind->collective, made.collective) &&
        !strcmp(kind->algorithm, made.algorithm) && !strcmp(kind->protocol, made.protocol))
      return i;
  }
  if (context->kinds == KINDS) return -1;
  context->kind[context->kinds] = made;
  return context->kinds++;
}

static int start(void* handle, void** made, Event* event) {
  Context* context = handle;
  if (!made) return SUCCESS;
  *made = NULL;
  if (!context || !event) return SUCCESS;
  // Of v4 only the first byte is set; the two types asked for fit into it.
  uint8_t type = *(const uint8_t*)&event->type;
  pthread_mutex_lock(&context->lock);
  if (type == COLLECTIVE) {
    size_t times = 1;
    const char* name = collective_name(event->collective.function, context->ranks, &times);
    if (name && event->collective.count) {
      size_t bytes = event->collective.count * bytes_of(event->collective.datatype) * times;
      Call* call = &context->calls[context->serial % CALLS];
      *call = (Call){0, context, kind_of(context, name, bytes, event), event->collective.channels, 0,
                     ++context->serial, UINT64_MAX, 0};
      *made = call;
    }
  } else if (type == KERNEL_CHANNEL && event->parent) {
    Call* call = event->parent;
    Part* part = &context->part[context->parts++ % PARTS];
    *part = (Part){1, call, call->serial, event->kernel.timer};
    *made = part;
  }
  pthread_mutex_unlock(&context->lock);
  return SUCCESS;
}

// A channel's part of a kernel has ended; with the last one the call has.
static void part_ended(Context* context, Call* call, uint64_t begin, uint64_t end) {
  if (begin < call->begin) call->begin = begin;
  if (end > call->end) call->end = end;
  if (++call->stopped != call->channels || call->kind < 0 || call->end <= call->begin) return;
  Kind* kind = &context->kind[call->kind];
  kind->us[kind->calls++ % SAMPLES] = (double)(call->end - call->begin) / 1000.0;
  ++context->ended;
  if (time(NULL) - context->written >= WRITE_AFTER_S) write_table(context);
}

static int state(void* handle, int what, StateArguments* arguments) {
  Part* part = handle;
  if (!part || !part->is_part || what != CHANNEL_STOPPED || !arguments) return SUCCESS;
  Context* context = part->call->context;
  pthread_mutex_lock(&context->lock);
  // Thousands of calls later its place belongs to another one.
  if (part->call->serial == part->serial) part_ended(context, part->call, part->begin, arguments->kernel.timer);
  pthread_mutex_unlock(&context->lock);
  return SUCCESS;
}

static int stop(void* handle) {
  (void)handle;
  return SUCCESS;
}

static int finalize(void* handle) {
  Context* context = handle;
  if (!context) return SUCCESS;
  pthread_mutex_lock(&all_lock);
  for (int i = 0; i < MAX_CONTEXTS; ++i)
    if (all[i] == context) all[i] = NULL;
  pthread_mutex_unlock(&all_lock);
  pthread_mutex_lock(&context->lock);
  write_table(context);
  pthread_mutex_unlock(&context->lock);
  // NCCL's threads may still hold parts of it; a communicator's memory is kept for them, as it is a few MB at most.
  return SUCCESS;
}

// A job that ends without taking its communicators down.
__attribute__((destructor)) static void write_all(void) {
  for (int i = 0; i < MAX_CONTEXTS; ++i)
    if (all[i] && pthread_mutex_trylock(&all[i]->lock) == 0) {
      write_table(all[i]);
      pthread_mutex_unlock(&all[i]->lock);
    }
}

typedef int (*InitV4)(void**, int*, const char*, uint64_t, int, int, int, Logger);
typedef int (*InitV5)(void**, uint64_t, int*, const char*, int, int, int, Logger);

#define EXPORT __attribute__((visibility("default")))
#define PROFILER(Init)                         \
  struct {                                     \
    const char* name;                          \
    Init init;                                 \
    int (*start)(void*, void**, Event*);       \
    int (*stop)(void*);                        \
    int (*state)(void*, int, StateArguments*); \
    int (*finalize)(void*);                    \
  }

EXPORT const PROFILER(InitV4) ncclProfiler_v4 = {"stretto", init_v4, start, stop, state, finalize};
EXPORT const PROFILER(InitV5) ncclProfiler_v5 = {"stretto", init_v5, start, stop, state, finalize};
EXPORT const PROFILER(InitV5) ncclProfiler_v6 = {"stretto", init_v5, start, stop, state, finalize};

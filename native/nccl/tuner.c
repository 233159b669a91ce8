// SPDX-License-Identifier: Apache-2.0
// libnccl-tuner-stretto.so: NCCL's tuner plugin, interfaces v3 to v6, for the table that `stretto plan --tuner` writes.
//
// NCCL loads it with NCCL_TUNER_PLUGIN (its path, or `stretto` where the loader finds it) and the table with
// NCCL_TUNER_CONFIG_FILE. It has an opinion only where a line of the table serves the call and NCCL can run what the line
// names: it then makes that algorithm and protocol the cheapest and says the number of channels. Everything else is left
// to NCCL. The answer depends on the arguments and the table alone, so that all ranks give the same. It never fails: an
// error of a tuner would fail the collective.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0 };
enum { WARN = 2, INFO = 3, TUNING = 64 };
enum { MAX_LINE = 256, MAX_LINES = 1 << 16, MAX_ALGORITHMS = 7, MIN_FIELDS = 8, MAX_FIELDS = 10 };

typedef void (*Logger)(int level, unsigned long flags, const char* file, int line, const char* format, ...);

// In the order of NCCL's enumerations.
static const char* const COLLECTIVES[] = {"broadcast", "reduce", "allgather", "reducescatter", "allreduce"};
static const char* const ALGORITHMS[] = {"tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat"};
static const char* const PROTOCOLS[] = {"ll", "ll128", "simple", "any"};
enum { ANY = 3 };

typedef struct {
  int collective, algorithm, protocol, channels;
  long long min_bytes, max_bytes, nodes, ranks, pipe_ops, registered;
} Line;

typedef struct {
  size_t ranks, nodes, count;
  Line lines[];
} Table;

static int position(const char* word, const char* const* names, int count) {
  for (int i = 0; i < count; ++i)
    if (strcmp(word, names[i]) == 0) return i;
  return -1;
}

static char* trimmed(char* text) {
  while (*text == ' ' || *text == '\t') ++text;
  size_t length = strlen(text);
  while (length && strchr(" \t\r\n", text[length - 1])) text[--length] = 0;
  return text;
}

static int whole(const char* text, long long* value) {
  char* end;
  *value = strtoll(text, &end, 10);
  return end != text && *end == 0;
}

// 1: a line, 0: a comment or an empty line, -1: not valid.
static int parse(char* text, Line* line) {
  char* word = trimmed(text);
  if (*word == 0 || *word == '#') return 0;
  char* fields[MAX_FIELDS + 1];
  int count = 0;
  for (char* next = word; next && count <= MAX_FIELDS; ++count) {
    char* comma = strchr(next, ',');
    if (comma) *comma = 0;
    fields[count] = trimmed(next);
    next = comma ? comma + 1 : NULL;
  }
  if (count < MIN_FIELDS || count > MAX_FIELDS) return -1;
  long long channels = 0;
  line->pipe_ops = line->registered = -1;
  line->collective = position(fields[0], COLLECTIVES, 5);
  line->algorithm = position(fields[3], ALGORITHMS, MAX_ALGORITHMS);
  line->protocol = position(fields[4], PROTOCOLS, ANY + 1);
  int good = line->collective >= 0 && line->algorithm >= 0 && line->protocol >= 0 && whole(fields[1], &line->min_bytes) &&
             whole(fields[2], &line->max_bytes) && whole(fields[5], &channels) && whole(fields[6], &line->nodes) &&
             whole(fields[7], &line->ranks) && (count < 9 || whole(fields[8], &line->pipe_ops)) &&
             (count < 10 || whole(fields[9], &line->registered));
  line->channels = (int)channels;
  return good && channels >= -1 && channels <= 1024 && line->min_bytes >= 0 && line->min_bytes <= line->max_bytes ? 1 : -1;
}

// The table of the file, or one without lines: a file that is wrong anywhere is not used at all, so that ranks which read
// the same file cannot differ by how far each of them understood it.
static Table* load(const char* path, size_t ranks, size_t nodes, Logger log) {
  Table* table = calloc(1, sizeof(Table));
  if (!table) return NULL;
  table->ranks = ranks;
  table->nodes = nodes;
  FILE* file = path ? fopen(path, "r") : NULL;
  if (!file) {
    if (log) log(path ? WARN : INFO, TUNING, __FILE__, __LINE__, "stretto: no table (NCCL_TUNER_CONFIG_FILE=%s)", path ? path : "");
    return table;
  }
  char text[MAX_LINE + 2];
  size_t room = 0, number = 0;
  int good = 1;
  while (good && fgets(text, sizeof text, file)) {
    ++number;
    Line line;
    int found = strchr(text, '\n') || feof(file) ? parse(text, &line) : -1;
    if (found < 0 || table->count == MAX_LINES) good = 0;
    if (found <= 0) continue;
    if (table->count == room) {
      room = room ? 2 * room : 64;
      Table* larger = realloc(table, sizeof(Table) + room * sizeof(Line));
      if (!larger) {
        good = 0;
        break;
      }
      table = larger;
    }
    table->lines[table->count++] = line;
  }
  good = good && !ferror(file);
  fclose(file);
  if (!good) table->count = 0;
  if (log && !good) log(WARN, TUNING, __FILE__, __LINE__, "stretto: %s:%zu is not valid; NCCL decides", path, number);
  if (log && good) log(INFO, TUNING, __FILE__, __LINE__, "stretto: %s: %zu lines", path, table->count);
  return table;
}

static int fits(const Table* table, const Line* line, int collective, size_t bytes, int pipe_ops, int registered) {
  return line->collective == collective && (unsigned long long)line->min_bytes <= bytes &&
         bytes <= (unsigned long long)line->max_bytes && (line->nodes == -1 || line->nodes == (long long)table->nodes) &&
         (line->ranks == -1 || line->ranks == (long long)table->ranks) &&
         (line->pipe_ops == -1 || line->pipe_ops == pipe_ops) &&
         (line->registered == -1 || registered < 0 || line->registered == registered);
}

// The protocol that a line means: its own, or for "any" the one that NCCL thinks fastest; -1 where it cannot run.
static int chosen(const float* costs, int protocols, int wanted) {
  int found = -1;
  for (int i = 0; i < protocols; ++i) {
    if (costs[i] < 0 || (wanted != ANY && wanted != i)) continue;
    if (found < 0 || costs[i] < costs[found]) found = i;
  }
  return found;
}

static int decide(void* context, int collective, size_t bytes, int pipe_ops, float** costs, int algorithms, int protocols,
                  int registered, int* channels) {
  const Table* table = context;
  if (!table || !costs || !channels) return SUCCESS;
  float* cost = (float*)costs;  // NCCL passes float[algorithms][protocols]
  for (size_t i = 0; i < table->count; ++i) {
    const Line* line = &table->lines[i];
    if (!fits(table, line, collective, bytes, pipe_ops, registered)) continue;
    if (line->algorithm >= algorithms) continue;
    int protocol = chosen(&cost[line->algorithm * protocols], protocols, line->protocol);
    if (protocol < 0) continue;  // NCCL cannot run it here
    cost[line->algorithm * protocols + protocol] = 0;
    if (line->channels > 0) *channels = line->channels;
    return SUCCESS;
  }
  return SUCCESS;
}

static int init_v3(size_t ranks, size_t nodes, Logger log, void** context) {
  *context = load(getenv("NCCL_TUNER_CONFIG_FILE"), ranks, nodes, log);
  return SUCCESS;
}

static int init_v5(void** context, uint64_t communicator, size_t ranks, size_t nodes, Logger log, void* domains,
                   void* constants) {
  (void)communicator, (void)domains, (void)constants;
  return init_v3(ranks, nodes, log, context);
}

static int decide_v3(void* context, int collective, size_t bytes, int pipe_ops, float** costs, int algorithms,
                     int protocols, int* channels) {
  return decide(context, collective, bytes, pipe_ops, costs, algorithms, protocols, -1, channels);
}

static int end(void* context) {
  free(context);
  return SUCCESS;
}

typedef int (*InitV3)(size_t, size_t, Logger, void**);
typedef int (*InitV5)(void**, uint64_t, size_t, size_t, Logger, void*, void*);
typedef int (*DecideV3)(void*, int, size_t, int, float**, int, int, int*);
typedef int (*DecideV4)(void*, int, size_t, int, float**, int, int, int, int*);

#define EXPORT __attribute__((visibility("default")))

EXPORT const struct {
  const char* name;
  InitV3 init;
  DecideV3 decide;
  int (*destroy)(void*);
} ncclTunerPlugin_v3 = {"stretto", init_v3, decide_v3, end};

EXPORT const struct {
  const char* name;
  InitV3 init;
  DecideV4 decide;
  int (*destroy)(void*);
} ncclTunerPlugin_v4 = {"stretto", init_v3, decide, end};

EXPORT const struct {
  const char* name;
  InitV5 init;
  DecideV4 decide;
  int (*finalize)(void*);
} ncclTunerPlugin_v5 = {"stretto", init_v5, decide, end};

EXPORT const struct {
  const char* name;
  InitV5 init;
  DecideV4 decide;
  int (*finalize)(void*);
  void* chunk_size;
} ncclTunerPlugin_v6 = {"stretto", init_v5, decide, end, NULL};

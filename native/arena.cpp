// SPDX-License-Identifier: Apache-2.0
// Memory that Python has made beforehand, given out in pieces: the two functions that a torch.cuda.MemPool calls for its
// segments. They call neither CUDA nor Python, since PyTorch's allocator holds its lock while it waits for them.
#include <cstdint>
#include <map>
#include <mutex>

#include <sys/types.h>

namespace {
constexpr uint64_t kAlign = 512;
struct Arena {
  uint64_t begin = 0, end = 0;
  std::map<uint64_t, uint64_t> taken;  // where a piece begins, and its end
};
std::mutex mutex;
std::map<int, Arena> arenas;
int last = 0;
thread_local int current = 0;
}  // namespace

#define SEEN extern "C" __attribute__((visibility("default"), used))

SEEN int stretto_arena_add(uint64_t begin, uint64_t size) {
  std::lock_guard<std::mutex> lock(mutex);
  arenas[++last] = {begin, begin + size, {}};
  return last;
}
SEEN void stretto_arena_drop(int number) {
  std::lock_guard<std::mutex> lock(mutex);
  arenas.erase(number);
}
// The arena of this thread from now on (0: none); returns the one before.
SEEN int stretto_arena_use(int number) {
  const int before = current;
  current = number;
  return before;
}
SEEN void* stretto_arena_alloc(ssize_t size, int, void*) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = arenas.find(current);
  if (found == arenas.end() || size <= 0) return nullptr;
  Arena& arena = found->second;
  const uint64_t wanted = ((uint64_t)size + kAlign - 1) / kAlign * kAlign;
  uint64_t at = (arena.begin + kAlign - 1) / kAlign * kAlign;
  for (const auto& [begin, end] : arena.taken) {
    if (begin >= at + wanted) break;
    at = end;
  }
  if (at + wanted > arena.end) return nullptr;
  arena.taken[at] = at + wanted;
  return (void*)at;
}
SEEN void stretto_arena_free(void* piece, ssize_t, int, void*) {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& [number, arena] : arenas)
    if (arena.taken.erase((uint64_t)piece)) return;
}
// The pieces of an arena, as offsets of their beginnings and ends; returns how many there are.
SEEN int stretto_arena_pieces(int number, uint64_t* out, int most) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = arenas.find(number);
  if (found == arenas.end()) return 0;
  int at = 0;
  for (const auto& [begin, end] : found->second.taken)
    if (at++ < most) out[2 * at - 2] = begin - found->second.begin, out[2 * at - 1] = end - found->second.begin;
  return at;
}

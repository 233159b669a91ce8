// SPDX-License-Identifier: Apache-2.0
// The GPU interpreter's kernel compiled for the CPU, for tests: every thread of every block of every rank is a fiber,
// and which one runs next is drawn from a seed, so that orders come up that no GPU shows.
#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <tuple>
#include <vector>

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "arrays.h"

namespace {

struct GpuMemory {  // What stays between launches: addresses of each rank's symmetric memory and state.
  std::vector<uint64_t> memory, state;
  uint64_t slots_at, packets_at, block_slots, block_packets;
};
struct GpuLaunch {  // One program: per rank the addresses of its stream, input and output.
  std::vector<uint64_t> streams, headers, words, input, output;
  int element, operation, blocks, threads;
  uint32_t slot_bytes, packet_bytes;
  bool shared;  // Whether other ranks may touch input and output: if not, a touch is a fault.
};

using u32 = uint32_t;
using u64 = unsigned long long;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  int rank = 0, block = 0, thread = 0, meeting = 0;
  bool waits = false, done = false;
};

struct World {
  std::vector<std::unique_ptr<Fiber>> fibers;
  Fiber* now = nullptr;
  ucontext_t home;
  std::mt19937 random;
  int blocks = 1, threads = 1;
  u64 clock = 0;
  std::map<std::pair<int, int>, bool> gave_up;  // by rank and block
};
World* world = nullptr;

// Gives way to the scheduler; `meets` lasts until all threads of the block have come.
void give_way(bool meets) {
  world->now->waits = meets;
  swapcontext(&world->now->context, &world->home);
}
bool meet_any(bool mine) {  // Whoever gives up does so for good, so nobody takes it back.
  bool& any = world->gave_up[{world->now->rank, world->now->block}];
  any = any || mine;
  give_way(true);
  return any;
}
void maybe() {
  if ((world->random() & 7) == 0) give_way(false);
}

#define STRETTO_CPU
#define STRETTO_SHAPES 0x7ff
#define DEV static inline
#define CALLED static
#define UNROLL
#define ROLLED
#define WARP_BITS 1
#define THREAD ((u32)world->now->thread)
#define THREADS ((u32)world->threads)
#define BLOCK ((u32)world->now->block)
#define BLOCKS ((u32)world->blocks)
#define MEET() give_way(true)
#define MEET_ANY(x) meet_any(x)
#define PAUSE() give_way(false)
DEV void st_release(u32* p, u32 v) { maybe(); *p = v; maybe(); }
DEV u32 ld_acquire(const u32* p) { return *p; }
DEV void st_relaxed(u32* p, u32 v) { st_release(p, v); }
DEV u32 ld_volatile(const u32* p) { return *p; }
DEV uint4 ld_vector(const uint4* p) { maybe(); return *p; }
DEV void st_vector(uint4* p, uint4 v) { maybe(); *p = v; }
DEV uint4 ld_packet(const uint4* p) { maybe(); return *p; }
DEV void st_packet(uint4* p, uint4 v) { maybe(); *p = v; }
DEV float float_of(u32 bits) { float f; std::memcpy(&f, &bits, 4); return f; }
DEV u32 bits_of(float f) { u32 b; std::memcpy(&b, &f, 4); return b; }
DEV float from_half(unsigned short h) {
  const u32 sign = (u32)(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000u | (rest & 0x3ff) << 13);
  if (rest >= 0x400) return float_of(sign | ((rest << 13) + (112u << 23)));
  const float tiny = (float)rest * 5.9604644775390625e-8f;  // 2^-24
  return sign ? -tiny : tiny;
}
DEV unsigned short to_half(float f) {
  const u32 b = bits_of(f), sign = b >> 16 & 0x8000, rest = b & 0x7fffffff;
  if (rest > 0x7f800000u) return (unsigned short)(sign | 0x7e00);
  if (rest >= 0x477ff000u) return (unsigned short)(sign | 0x7c00);
  if (rest < 0x38800000u) {  // Subnormal: in units of 2^-24, rounded to even by the addition of 2^23 x 2^-24 = 0.5.
    return (unsigned short)(sign | (bits_of(float_of(rest) + 0.5f) - bits_of(0.5f)));
  }
  return (unsigned short)(sign | (((rest + 0xfffu + (rest >> 13 & 1)) >> 13) - (112u << 10)));
}
DEV u64 now_ns() { return ++world->clock; }
DEV u32 leading_zeros(u32 v) { return (u32)__builtin_clz(v); }
DEV bool first_to(u32* p) { return *p ? false : (*p = 1, true); }

#include "../src/stretto/runtime/gpu/kernel.cu"
#include "../src/stretto/runtime/gpu/kernel_packets.cu"
#include "../src/stretto/runtime/gpu/kernel_ends.cu"

struct RankParams {  // Of one launch on one rank: which of the three is used is in the header.
  Params plain;
  PacketParams packets;
  EndParams ends;
};
using Run = void (*)(const RankParams&, Shared&);
template <class E, int OP> void interpret_any(const RankParams& p, Shared& shared) {
  if (p.plain.header[H_USES_SLOTS] & 4) interpret_packets<E, OP>(p.packets);
  else if (p.plain.header[H_USES_SLOTS] & 8) interpret_ends<E, OP>(p.ends);
  else interpret<E, OP>(p.plain, shared);
}
template <class E> Run of(int operation) {
  constexpr Run runs[] = {interpret_any<E, SUM>, interpret_any<E, PROD>, interpret_any<E, MIN>, interpret_any<E, MAX>, interpret_any<E, AVG>};
  return runs[operation];
}
Run choose(int element, int operation) {
  constexpr Run (*elements[])(int) = {of<float>, of<Half>, of<Brain>, of<double>, of<signed char>,
                                      of<short>, of<int>, of<long long>, of<unsigned char>, of<Truth>};
  if (element < 0 || element > 9 || operation < 0 || operation > 4) throw std::invalid_argument("element or operation");
  return elements[element](operation);
}

struct Call {
  const std::vector<GpuLaunch>* launches;
  std::vector<std::vector<std::unique_ptr<Shared>>> shared;  // [rank][block]
  std::vector<std::vector<RankParams>> params;               // [launch][rank]
  std::vector<int> arrived;                                  // per rank: fibers at the end of a launch
  std::vector<int> launch;                                   // per rank: the launch that runs
};
Call* call = nullptr;

void body() {
  Fiber& me = *world->now;
  for (size_t l = 0; l < call->launches->size(); l++) {
    while (call->launch[me.rank] < (int)l) give_way(false);  // A kernel starts once the one before it has ended.
    const GpuLaunch& launch = (*call->launches)[l];
    const int total = launch.blocks * launch.threads;
    if (me.block < launch.blocks && me.thread < launch.threads) {
      choose(launch.element, launch.operation)(call->params[l][me.rank], *call->shared[me.rank][me.block]);
      if (++call->arrived[me.rank] == total) call->arrived[me.rank] = 0, call->launch[me.rank]++;
    }
  }
  me.done = true;
  swapcontext(&me.context, &world->home);
}

void schedule(const std::vector<GpuLaunch>& launches, u64 most) {
  std::vector<Fiber*> alive;
  for (auto& fiber : world->fibers) alive.push_back(fiber.get());
  for (u64 turn = 0; !alive.empty(); turn++) {
    if (turn > most) throw std::runtime_error("the ranks do not come to an end");
    const size_t at = world->random() % alive.size();
    Fiber* fiber = alive[at];
    const GpuLaunch& launch = launches[std::min<size_t>(call->launch[fiber->rank], launches.size() - 1)];
    if (fiber->waits) {
      // All threads of the block must have come to a meeting.
      std::vector<Fiber*> block;
      for (Fiber* other : alive)
        if (other->rank == fiber->rank && other->block == fiber->block && other->thread < launch.threads) block.push_back(other);
      bool all = (int)block.size() == launch.threads;
      for (Fiber* other : block) all = all && other->waits;
      if (!all) continue;
      for (Fiber* other : block) other->waits = false;
    }
    world->blocks = launch.blocks, world->threads = launch.threads;
    world->now = fiber;
    swapcontext(&world->home, &fiber->context);
    if (fiber->done) alive[at] = alive.back(), alive.pop_back();
  }
}

PacketParams packet_params(const Params& p, int rank, int ranks) {
  PacketParams q{};
  if (ranks > QUIET_RANKS || p.words > INLINE_WORDS) throw std::invalid_argument("too much for a launch");
  q.limits = p.limits, q.state = p.state, q.input = p.input[rank], q.output = p.output[rank];
  for (int r = 0; r < ranks; r++) q.memory[r] = p.memory[r];
  q.packets_at = p.packets_at, q.block_packets = p.block_packets, q.slot_bytes = p.slot_bytes, q.packet_bytes = p.packet_bytes;
  q.rank = rank, q.ranks = ranks, q.rounds = p.header[H_ROUNDS], q.steps = p.header[H_STEPS], q.pending = p.header[H_PENDING];
  std::memcpy(q.stream, p.stream, p.words * sizeof(int));
  return q;
}

EndParams end_params(const Params& p, int rank, int ranks) {
  EndParams q{};
  if (ranks > QUIET_RANKS || p.words > INLINE_WORDS) throw std::invalid_argument("too much for a launch");
  q.limits = p.limits, q.state = p.state, q.slot_bytes = p.slot_bytes;
  for (int r = 0; r < ranks; r++) q.memory[r] = p.memory[r], q.input[r] = p.input[r], q.output[r] = p.output[r];
  q.rank = rank, q.ranks = ranks, q.steps = p.header[H_STEPS];
  q.ready = p.header[H_READY], q.tell_ready = p.header[H_TELL_READY];
  q.done = p.header[H_DONE], q.tell_done = p.header[H_TELL_DONE];
  std::memcpy(q.stream, p.stream, p.words * sizeof(int));
  return q;
}

void run(const GpuMemory& m, const std::vector<GpuLaunch>& launches, u64 seed, u64 most) {
  World here;
  Call what;
  here.random.seed(seed);
  const int ranks = (int)m.memory.size();
  int blocks = 1, threads = 1;
  for (const GpuLaunch& l : launches) blocks = std::max(blocks, l.blocks), threads = std::max(threads, l.threads);
  what.launches = &launches;
  what.arrived.assign(ranks, 0), what.launch.assign(ranks, 0);
  std::vector<u32> aborts(ranks, 0), reports(ranks * 16, 0);
  for (const GpuLaunch& l : launches) {
    auto& row = what.params.emplace_back(ranks);
    for (int r = 0; r < ranks; r++) {
      std::memset(&row[r], 0, sizeof row[r]);
      Params& p = row[r].plain;
      p.stream = (const int*)l.streams[r], p.words = (u32)l.words[r], p.state = (u32*)m.state[r];
      p.limits = {&aborts[r], &reports[r * 16 + 8], &reports[r * 16], ~0ull, 0, 0};
      for (int q = 0; q < ranks; q++) p.memory[q] = m.memory[q], p.input[q] = l.input[q], p.output[q] = l.output[q];
      p.slots_at = m.slots_at, p.packets_at = m.packets_at;
      p.block_slots = m.block_slots, p.block_packets = m.block_packets;
      p.slot_bytes = l.slot_bytes, p.packet_bytes = l.packet_bytes;
      std::memcpy(p.header, (const int*)l.headers[r], sizeof p.header + sizeof p.heard);
      if (p.header[H_USES_SLOTS] & 4) row[r].packets = packet_params(p, r, ranks);
      if (p.header[H_USES_SLOTS] & 8) row[r].ends = end_params(p, r, ranks);
      if (!l.shared) for (int q = 0; q < ranks; q++) if (q != r) p.input[q] = p.output[q] = 0;
    }
  }
  for (int r = 0; r < ranks; r++) {
    auto& row = what.shared.emplace_back();
    for (int b = 0; b < blocks; b++) {
      row.push_back(std::make_unique<Shared>());
      for (int t = 0; t < threads; t++) {
        auto fiber = std::make_unique<Fiber>();
        fiber->stack.resize(64 << 10);
        fiber->rank = r, fiber->block = b, fiber->thread = t;
        getcontext(&fiber->context);
        fiber->context.uc_stack.ss_sp = fiber->stack.data();
        fiber->context.uc_stack.ss_size = fiber->stack.size();
        fiber->context.uc_link = nullptr;
        makecontext(&fiber->context, body, 0);
        here.fibers.push_back(std::move(fiber));
      }
    }
  }
  world = &here, call = &what;
  schedule(launches, most);
}

using Addresses = std::vector<uint64_t>;
using Row = std::tuple<Addresses, Addresses, Addresses, Addresses, Addresses, std::vector<int>, bool>;

}  // namespace

namespace stretto {
void bind_gpu_streams(nb::module_& m) {
  m.def("run_gpu_streams", [](const Addresses& memory, const Addresses& state, const Addresses& layout,
                              const std::vector<Row>& rows, uint64_t seed, uint64_t most) {
    GpuMemory held{memory, state, layout.at(0), layout.at(1), layout.at(2), layout.at(3)};
    std::vector<GpuLaunch> launches;
    for (const auto& [streams, headers, words, input, output, numbers, shared] : rows)
      launches.push_back({streams, headers, words, input, output, numbers.at(0), numbers.at(1), numbers.at(2), numbers.at(3),
                          (uint32_t)numbers.at(4), (uint32_t)numbers.at(5), shared});
    run(held, launches, seed, most);
  }, nb::arg("memory"), nb::arg("state"), nb::arg("layout"), nb::arg("launches"), nb::arg("seed"), nb::arg("most"));
}
}  // namespace stretto

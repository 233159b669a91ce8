// SPDX-License-Identifier: Apache-2.0
// The interpreter of fused steps (stretto.programs.fused). NVRTC compiles it for a GPU, with STRETTO_ELEMENT,
// STRETTO_OPERATION and STRETTO_SHAPES: bit N-1 for steps of N sources (bit 8: more than eight), bit 9 for packets, bit 10
// for programs of packets alone (`interpret_packets`), bit 11 where the stream comes with the launch, bit 12 for programs
// whose ranks meet at the beginning and the end alone (`interpret_ends`). What a program does not need is left out: small
// code, and no registers that spill, are what makes small calls fast.
// kernel_packets.cu and kernel_ends.cu stand behind this text. g++ compiles the same for tests
// (native/gpu_streams.cpp), where every thread is a fiber.
// Block b of a rank runs its rank's whole stream on slice b of every chunk and only meets block b of other ranks.
#ifndef STRETTO_CPU
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEV static __device__ __forceinline__
#define CALLED static __device__ __noinline__  // What is rarely needed stays out of the way.
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
DEV void st_release(u32* p, u32 v) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEV u32 ld_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEV void st_relaxed(u32* p, u32 v) { asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEV u32 ld_volatile(const u32* p) { return *(const volatile u32*)p; }
DEV uint4 ld_vector(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEV void st_vector(uint4* p, uint4 v) {
  // What nobody reads in the same kernel goes first when the cache is full: large calls are up to 6 % faster.
  if (STRETTO_SHAPES & 0x1000) asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
  else asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEV uint4 ld_packet(const uint4* p) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEV void st_packet(uint4* p, uint4 v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEV float from_half(unsigned short h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
DEV unsigned short to_half(float f) {
  unsigned short h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
DEV float float_of(u32 bits) { return __uint_as_float(bits); }
DEV u32 bits_of(float f) { return __float_as_uint(f); }
DEV u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
DEV bool first_to(u32* p) { return atomicCAS(p, 0u, 1u) == 0u; }
DEV void delay(u32 ns) { __nanosleep(ns); }
DEV u32 leading_zeros(u32 v) { return __clz((int)v); }
#define THREAD threadIdx.x
#define THREADS blockDim.x
#define BLOCK blockIdx.x
#define BLOCKS gridDim.x
#define MEET() __syncthreads()
#define MEET_ANY(x) __syncthreads_or(x)  // whether it is so for any thread
#define WARP_BITS 5
#define PAUSE()
#endif

enum { IN, OUT, SLOT, PACKET, SPACES };
enum { SUM, PROD, MIN, MAX, AVG };
enum { MAX_RANKS = 32, STATE_WORDS = 96, STREAM_WORDS = 3072, STEP_WORDS = 6, PACKETS = 1 << 9, QUIET = 1 << 10, INLINED = 1 << 11, ENDS = 1 << 12 };
enum { EVERYTHING = STRETTO_SHAPES == 0x7ff, PLAIN = !(STRETTO_SHAPES & PACKETS) || EVERYTHING, QUIET_RANKS = 8, INLINE_WORDS = 192 };
enum { H_RANK, H_RANKS, H_ROUNDS, H_STEPS, H_USES_SLOTS, H_PENDING, H_READY, H_TELL_READY, H_STARTS, H_DONE, H_TELL_DONE };
enum { S_SHAPE, S_ITEMS, S_AT, S_SIGNALS, S_WAITS, S_WAITS_AT };
enum { SYNC = 1, FINISH = 2 };

struct Limits {
  u32* abort;        // device memory: set by whoever gives up
  u32* host_abort;   // host memory: set from outside
  u32* report;       // host memory: who waited for whom
  u64 limit_ns;
  u32 number;        // of the program, for reports
  u32 seed;          // of random delays
};

struct Params {
  Limits limits;
  const int* stream;
  u32* state;        // per block: signals heard of each rank, signals sent to each, then epoch and pending
  u64 memory[MAX_RANKS];
  u64 input[MAX_RANKS];
  u64 output[MAX_RANKS];
  u64 slots_at, packets_at;              // offsets in the symmetric memory; flags are at 0
  u64 block_slots, block_packets;        // bytes of one block, for both parities
  u32 slot_bytes, packet_bytes;          // of one slot
  u32 words;
  u32 unused;
  int header[16];
  int heard[MAX_RANKS];                  // how many signals of each rank a round brings
  int inlined[STRETTO_SHAPES & INLINED ? INLINE_WORDS : 1];  // the stream, where it is short
};

struct Shared {
  u64 base[SPACES][MAX_RANKS];
  u32 heard[MAX_RANKS], sent[MAX_RANKS];
  u32 dead;
  int stream[STRETTO_SHAPES & INLINED ? 1 : STREAM_WORDS];
};

// ---- elements: how many fit, and how they are added up (halves as float) ----
struct Half { unsigned short bits; };
struct Brain { unsigned short bits; };
struct Truth { unsigned char bits; };
template <class E> struct Element {
  typedef E W;
  DEV W widen(E e) { return e; }
  DEV E narrow(W w) { return w; }
};
template <> struct Element<Half> {
  typedef float W;
  DEV W widen(Half e) { return from_half(e.bits); }
  DEV Half narrow(W w) { Half e = {to_half(w)}; return e; }
};
template <> struct Element<Brain> {
  typedef float W;
  DEV W widen(Brain e) { return float_of((u32)e.bits << 16); }
  DEV Brain narrow(W w) {
    u32 b = bits_of(w);
    Brain e = {(unsigned short)((b & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u | (b >> 16) : (b + 0x7fffu + ((b >> 16) & 1u)) >> 16)};
    return e;
  }
};
template <> struct Element<Truth> {
  typedef int W;
  DEV W widen(Truth e) { return e.bits != 0; }
  DEV Truth narrow(W w) { Truth e = {(unsigned char)(w != 0)}; return e; }
};
template <int OP, class W> DEV W combine(W a, W b) {
  if (OP == PROD) return (W)(a * b);
  if (OP == MIN) return (a < b || a != a) ? a : b;  // Not-a-number wins, as in PyTorch.
  if (OP == MAX) return (a > b || a != a) ? a : b;
  return (W)(a + b);
}

template <class E, int BYTES> union Pack {
  enum { COUNT = BYTES / sizeof(E) };
  E e[COUNT];
  u32 w[BYTES / 4];
};

// A sum of vectors is kept wide; `n` is what an average divides by, or 0.
template <class E, int OP, int BYTES> DEV void begin_sum(typename Element<E>::W* sum, const Pack<E, BYTES>& v) {
  UNROLL for (int k = 0; k < (int)Pack<E, BYTES>::COUNT; k++) sum[k] = Element<E>::widen(v.e[k]);
}
template <class E, int OP, int BYTES> DEV void add_to(typename Element<E>::W* sum, const Pack<E, BYTES>& v) {
  UNROLL for (int k = 0; k < (int)Pack<E, BYTES>::COUNT; k++) sum[k] = combine<OP>(sum[k], Element<E>::widen(v.e[k]));
}
template <class E, int OP, int BYTES> DEV Pack<E, BYTES> end_sum(typename Element<E>::W* sum, int n) {
  typedef typename Element<E>::W W;
  Pack<E, BYTES> v;
  UNROLL for (int k = 0; k < (int)Pack<E, BYTES>::COUNT; k++) v.e[k] = Element<E>::narrow(OP == AVG && n ? (W)(sum[k] / (W)n) : sum[k]);
  return v;
}

// ---- waiting ----
// Called every 64th time that a wait has looked in vain.
CALLED bool given_up(const Limits& L, u32 polls, u64& since) {
  if (ld_volatile(L.abort)) return true;
  if (polls & 1023u) return false;
  if (ld_volatile(L.host_abort)) return true;
  u64 t = now_ns();
  if (!since) since = t;
  return t - since > L.limit_ns;
}
CALLED void report(const Limits& L, u32 peer, u32 step) {
  if (first_to(L.abort)) {
    volatile u32* r = L.report;
    r[1] = peer; r[2] = step; r[3] = BLOCK; r[4] = L.number; r[5] = ld_volatile(L.host_abort);
    r[0] = 1;
  }
}
DEV u32* flag(const Params& P, int of, int from) { return (u32*)P.memory[of] + BLOCK * MAX_RANKS + from; }
DEV void wait_for(const Params& P, Shared& sh, int rank, int peer, u32 number, int step) {
  u32 target = sh.heard[peer] + number;
  u32* mine = flag(P, rank, peer);
  u64 since = 0;
  ROLLED for (u32 polls = 1; (int)(ld_acquire(mine) - target) < 0; polls++) {
    PAUSE();
    if ((polls & 63u) == 0 && given_up(P.limits, polls, since)) {
      sh.dead = 1;
      return report(P.limits, peer, step);
    }
  }
}
// Called by all threads, after a meeting: each peer in the mask gets one signal.
DEV void tell(const Params& P, Shared& sh, int rank, u32 mask) {
  ROLLED for (u32 q = THREAD; q < MAX_RANKS; q += THREADS)
    if (mask >> q & 1) st_release(flag(P, q, rank), ++sh.sent[q]);
}
// The same before the kernel has written anything: what other kernels wrote is visible since they ended.
DEV void tell_ready(const Params& P, Shared& sh, int rank, u32 mask) {
  ROLLED for (u32 q = THREAD; q < MAX_RANKS; q += THREADS)
    if (mask >> q & 1) st_relaxed(flag(P, q, rank), ++sh.sent[q]);
}
// Waits for one more signal of each peer in the mask (or, with `number` 0, for all that were sent so far).
DEV void hear_all(const Params& P, Shared& sh, int rank, u32 mask, u32 number, int step) {
  ROLLED for (u32 q = THREAD; q < MAX_RANKS; q += THREADS)
    if (mask >> q & 1) {
      wait_for(P, sh, rank, q, number, step);
      sh.heard[q] += number;
    }
}

// ---- one step ----
struct Item {
  const int* at;     // operands as (code, offset)
  u32 low, count;    // the elements of the chunk that this block moves in this round
};
template <class E, class P_> DEV Item item_of(const P_& P, const int* words, int round) {
  const u32 elements = words[0], per = words[1], room = P.slot_bytes / sizeof(E);
  u64 low = (u64)per * BLOCK, high = low + per;
  if (high > elements) high = elements;
  low += (u64)room * round;
  u64 left = high > low ? high - low : 0;
  Item item = {words + 2, (u32)low, (u32)(left < room ? left : room)};
  return item;
}
template <class E> DEV char* address(const Params& P, const Shared& sh, const Item& item, int operand) {
  u32 code = item.at[2 * operand], offset = item.at[2 * operand + 1];
  u32 space = code >> 5;
  u64 base = sh.base[space][code & 31];
  if (space <= OUT) return (char*)(base + ((u64)offset + item.low) * sizeof(E));
  return (char*)(base + (u64)offset * (space == SLOT ? P.slot_bytes : P.packet_bytes));
}

// U vectors of each of N sources are loaded before any is added; MASKED: those that there are.
template <class E, int N, int U, bool MASKED>
DEV void load_vectors(Pack<E, 16> (&v)[U][N], char* const* from, u32 first, u32 stride, u32 count) {
  UNROLL for (int u = 0; u < U; u++) UNROLL for (int s = 0; s < N; s++)
    if (!MASKED || first + u * stride < count) *(uint4*)v[u][s].w = ld_vector((const uint4*)from[s] + first + u * stride);
}
template <class E, int OP, int N, int U, bool MASKED, class P_, class S_>
DEV void store_vectors(const P_& P, const S_& sh, Pack<E, 16> (&v)[U][N], const Item& item, int targets, u32 first, u32 stride, u32 count, int n) {
  UNROLL for (int u = 0; u < U; u++) {
    if (N > 1) {
      typename Element<E>::W sum[Pack<E, 16>::COUNT];
      begin_sum<E, OP, 16>(sum, v[u][0]);
      UNROLL for (int s = 1; s < N; s++) add_to<E, OP, 16>(sum, v[u][s]);
      v[u][0] = end_sum<E, OP, 16>(sum, n);
    }
  }
  for (int t = 0; t < targets; t++) {
    uint4* to = (uint4*)address<E>(P, sh, item, N + t) + first;
    // In symmetric memory (where S_ is `Nothing`) it may lie there already: an all-gather in place.
    if (N == 1 && sizeof(S_) == 1 && to == (uint4*)address<E>(P, sh, item, 0) + first) continue;
    UNROLL for (int u = 0; u < U; u++)
      if (!MASKED || first + u * stride < count) st_vector(to + u * stride, *(uint4*)v[u][0].w);
  }
}
// Any number of sources: one vector at a time.
template <class E, int OP, class P_, class S_>
CALLED void long_item(const P_& P, const S_& sh, Item item, int sources, int targets, u32 thread, u32 threads, u32 count, int n) {
  ROLLED for (u32 i = thread; i < count; i += threads) {
  typename Element<E>::W sum[Pack<E, 16>::COUNT];
  Pack<E, 16> v;
  ROLLED for (int s = 0; s < sources; s++) {
    *(uint4*)v.w = ld_vector((const uint4*)address<E>(P, sh, item, s) + i);
    if (s) add_to<E, OP, 16>(sum, v);
    else begin_sum<E, OP, 16>(sum, v);
  }
  v = end_sum<E, OP, 16>(sum, n);
  ROLLED for (int t = 0; t < targets; t++) st_vector((uint4*)address<E>(P, sh, item, sources + t) + i, *(uint4*)v.w);
  }
}
// Any alignment: element by element.
template <class E, int OP, class P_, class S_>
CALLED void scalars(const P_& P, const S_& sh, Item item, int sources, int targets, u32 low, u32 thread, u32 threads, int n) {
  ROLLED for (u32 i = low + thread; i < item.count; i += threads) {
    E value = ((const E*)address<E>(P, sh, item, 0))[i];
    if (sources > 1) {
      typename Element<E>::W sum = Element<E>::widen(value);
      ROLLED for (int s = 1; s < sources; s++) sum = combine<OP>(sum, Element<E>::widen(((const E*)address<E>(P, sh, item, s))[i]));
      value = Element<E>::narrow(OP == AVG && n ? (typename Element<E>::W)(sum / (typename Element<E>::W)n) : sum);
    }
    ROLLED for (int t = 0; t < targets; t++) ((E*)address<E>(P, sh, item, sources + t))[i] = value;
  }
}
// How many whole vectors an item has, where all its operands are aligned.
template <class E, class P_, class S_> DEV u32 whole_vectors(const P_& P, const S_& sh, const Item& item, int operands) {
  u64 bits = 0;
  ROLLED for (int o = 0; o < operands; o++) bits |= (u64)address<E>(P, sh, item, o);
  return bits & 15 ? 0 : item.count / (16 / sizeof(E));
}
template <class E, int OP, int N, class P_, class S_>
DEV void plain_item(const P_& P, const S_& sh, const Item& item, int targets, u32 thread, u32 threads, u32 count, int n) {
  // Of two sources the next vectors are under way while these are stored.
  enum { AHEAD = N == 2, U = N == 1 ? 8 : AHEAD ? 4 : 16 / N };
  char* from[N];
  UNROLL for (int s = 0; s < N; s++) from[s] = address<E>(P, sh, item, s);
  const u32 all = U * threads, last = all - threads;
  Pack<E, 16> v[U][N], next[U][N];
  u32 i = thread;
  if (AHEAD && i + last < count) load_vectors<E, N, U, false>(next, from, i, threads, count);
  ROLLED for (; i + last < count; i += all) {
    if (AHEAD) {
      UNROLL for (int u = 0; u < U; u++) UNROLL for (int s = 0; s < N; s++) v[u][s] = next[u][s];
      if (i + all + last < count) load_vectors<E, N, U, false>(next, from, i + all, threads, count);
    } else {
      load_vectors<E, N, U, false>(v, from, i, threads, count);
    }
    store_vectors<E, OP, N, U, false>(P, sh, v, item, targets, i, threads, count, n);
  }
  if (i < count) {
    load_vectors<E, N, U, true>(v, from, i, threads, count);
    store_vectors<E, OP, N, U, true>(P, sh, v, item, targets, i, threads, count, n);
  }
}
template <class E, int OP, int N, class P_, class S_>
DEV void plain_if(const P_& P, const S_& sh, const Item& item, int sources, int targets, u32 thread, u32 threads, u32 count, int n) {
  if (PLAIN && (STRETTO_SHAPES >> (N - 1) & 1) && sources == N) plain_item<E, OP, N>(P, sh, item, targets, thread, threads, count, n);
}

template <class E, int OP, class P_, class S_>
DEV void plain_work(const P_& P, const S_& sh, const Item& item, int sources, int targets, u32 thread, u32 threads, int n) {
  if (!item.count) return;
  const u32 count = whole_vectors<E>(P, sh, item, sources + targets), rest = count * (16 / sizeof(E));
  plain_if<E, OP, 1>(P, sh, item, sources, targets, thread, threads, count, n);
  plain_if<E, OP, 2>(P, sh, item, sources, targets, thread, threads, count, n);
  plain_if<E, OP, 3>(P, sh, item, sources, targets, thread, threads, count, n);
  plain_if<E, OP, 4>(P, sh, item, sources, targets, thread, threads, count, n);
  plain_if<E, OP, 5>(P, sh, item, sources, targets, thread, threads, count, n);
  plain_if<E, OP, 6>(P, sh, item, sources, targets, thread, threads, count, n);
  plain_if<E, OP, 7>(P, sh, item, sources, targets, thread, threads, count, n);
  plain_if<E, OP, 8>(P, sh, item, sources, targets, thread, threads, count, n);
  if (PLAIN && (STRETTO_SHAPES >> 8 & 1) && sources > 8) long_item<E, OP>(P, sh, item, sources, targets, thread, threads, count, n);
  if (PLAIN && rest < item.count) scalars<E, OP>(P, sh, item, sources, targets, rest, thread, threads, n);
}

// ---- packets: 8 bytes of data and the epoch twice, in one 16-byte store ----
template <class E> DEV Pack<E, 8> load8(const char* from, long long left) {
  Pack<E, 8> v;
  v.w[0] = v.w[1] = 0;
  if (left >= 8 && ((u64)from & 7) == 0) {
    uint2 d = *(const uint2*)from;
    v.w[0] = d.x, v.w[1] = d.y;
  } else {
    for (int k = 0; k < (int)Pack<E, 8>::COUNT; k++) if (k * (int)sizeof(E) < left) v.e[k] = ((const E*)from)[k];
  }
  return v;
}
template <class E> DEV void store8(char* to, const Pack<E, 8>& v, long long left) {
  if (left >= 8 && ((u64)to & 7) == 0) {
    uint2 d = {v.w[0], v.w[1]};
    *(uint2*)to = d;
  } else {
    for (int k = 0; k < (int)Pack<E, 8>::COUNT; k++) if (k * (int)sizeof(E) < left) ((E*)to)[k] = v.e[k];
  }
}
DEV bool by_packet(const Item& item, int operand) { return (item.at[2 * operand] >> 5) == PACKET; }
template <class E> DEV uint4 poll(const Params& P, Shared& sh, const Item& item, int operand, u32 i, uint4 q, u32 epoch, int step) {
  const uint4* from = (const uint4*)address<E>(P, sh, item, operand) + i;
  u64 since = 0;
  ROLLED for (u32 polls = 1; q.y != epoch || q.w != epoch; polls++) {
    PAUSE();
    if ((polls & 63u) == 0 && given_up(P.limits, polls, since)) {
      sh.dead = 1;
      report(P.limits, MAX_RANKS + item.at[2 * operand + 1], step);
      break;
    }
    q = ld_packet(from);
  }
  return q;
}
// All sources are loaded before any is waited for: N of them, or with N = 0 any number, eight at a time.
template <class E, int OP, int N>
DEV void packet_item(const Params& P, Shared& sh, const Item& item, int sources, int targets, u32 thread, u32 threads, u32 epoch, int n, int step) {
  enum { MOST = N ? N : 8 };
  long long bytes = (long long)item.count * sizeof(E);
  u32 count = bytes ? (u32)((bytes + 7) / 8) : 1;  // An empty slice is one packet too: whoever reads it has heard of us.
  ROLLED for (u32 i = thread; i < count; i += threads) {
    long long left = bytes - 8ll * i;
    typename Element<E>::W sum[Pack<E, 8>::COUNT];
    Pack<E, 8> v;
    ROLLED for (int first = 0; first < (N ? 1 : sources); first += MOST) {
      uint4 q[MOST];
      UNROLL for (int k = 0; k < MOST; k++) {
        if (!N && first + k >= sources) continue;
        const char* from = address<E>(P, sh, item, first + k);
        if (by_packet(item, first + k)) {
          q[k] = ld_packet((const uint4*)from + i);
        } else {
          v = load8<E>(from + 8ll * i, left);
          q[k].x = v.w[0], q[k].z = v.w[1];
        }
      }
      UNROLL for (int k = 0; k < MOST; k++) {
        if (!N && first + k >= sources) continue;
        if (by_packet(item, first + k)) q[k] = poll<E>(P, sh, item, first + k, i, q[k], epoch, step);
        v.w[0] = q[k].x, v.w[1] = q[k].z;
        if (N == 1) continue;
        if (first + k) add_to<E, OP, 8>(sum, v);
        else begin_sum<E, OP, 8>(sum, v);
      }
    }
    if (N != 1) v = end_sum<E, OP, 8>(sum, n);
    uint4 packet = {v.w[0], epoch, v.w[1], epoch};
    ROLLED for (int t = sources; t < sources + targets; t++) {
      char* to = address<E>(P, sh, item, t);
      if (by_packet(item, t)) st_packet((uint4*)to + i, packet);
      else store8<E>(to + 8ll * i, v, left);
    }
  }
}
template <class E, int OP, int N>
DEV void packet_if(const Params& P, Shared& sh, const Item& item, int sources, int targets, u32 thread, u32 threads, u32 epoch, int n, int step) {
  if ((STRETTO_SHAPES & PACKETS) && (STRETTO_SHAPES >> (N ? N - 1 : 8) & 1) && (N ? sources == N : sources > 8))
    packet_item<E, OP, N>(P, sh, item, sources, targets, thread, threads, epoch, n, step);
}

template <class E, int OP>
DEV void run_step(const Params& P, Shared& sh, const int* stream, const int* step, int number, int round, u32 epoch, bool packets, int ranks) {
  const int sources = step[S_SHAPE] & 255, targets = step[S_SHAPE] >> 8 & 255, items = step[S_ITEMS];
  const int stride = 2 + 2 * (sources + targets), n = step[S_SHAPE] >> 16 & FINISH ? ranks : 0;
  const int* words = stream + step[S_AT];
  // Small items share the block: as few threads each as have work, but whole warps.
  u32 threads = THREADS, each = (item_of<E>(P, words, round).count * (u32)sizeof(E) + 7) / 8;
  if (!packets) each = (each + 1) / 2;
  ROLLED while (threads > (1u << WARP_BITS) && threads / 2 >= each && (int)(THREADS / threads) < items) threads /= 2;
  const u32 thread = THREAD % threads;
  ROLLED for (int i = THREAD / threads; i < items; i += THREADS / threads) {
    Item item = item_of<E>(P, words + i * stride, round);
    if ((STRETTO_SHAPES & PACKETS) && packets) {
      packet_if<E, OP, 0>(P, sh, item, sources, targets, thread, threads, epoch, n, number);
      packet_if<E, OP, 1>(P, sh, item, sources, targets, thread, threads, epoch, n, number);
      packet_if<E, OP, 2>(P, sh, item, sources, targets, thread, threads, epoch, n, number);
      packet_if<E, OP, 3>(P, sh, item, sources, targets, thread, threads, epoch, n, number);
      packet_if<E, OP, 4>(P, sh, item, sources, targets, thread, threads, epoch, n, number);
      packet_if<E, OP, 5>(P, sh, item, sources, targets, thread, threads, epoch, n, number);
      packet_if<E, OP, 6>(P, sh, item, sources, targets, thread, threads, epoch, n, number);
      packet_if<E, OP, 7>(P, sh, item, sources, targets, thread, threads, epoch, n, number);
      packet_if<E, OP, 8>(P, sh, item, sources, targets, thread, threads, epoch, n, number);
      continue;
    }
    plain_work<E, OP>(P, sh, item, sources, targets, thread, threads, n);
  }
}

DEV void set_bases(const Params& P, Shared& sh, u32 epoch) {
  ROLLED for (u32 q = THREAD; q < MAX_RANKS; q += THREADS) {
    sh.base[SLOT][q] = P.memory[q] + P.slots_at + BLOCK * P.block_slots + (epoch & 1) * (P.block_slots / 2);
    sh.base[PACKET][q] = P.memory[q] + P.packets_at + BLOCK * P.block_packets + (epoch & 1) * (P.block_packets / 2);
  }
}
DEV void random_delay(const Limits& L, u32 a, u32 b, u32 c) {
#ifdef STRETTO_DELAYS
  u32 h = L.seed * 0x9e3779b9u ^ a * 0x85ebca6bu ^ b * 0xc2b2ae35u ^ c * 0x27d4eb2fu ^ (THREAD / 32) * 0x165667b1u ^ BLOCK * 0xd3a2646cu;
  h ^= h >> 15, h *= 0x2c1b3c6du, h ^= h >> 12, h *= 0x297a2d39u, h ^= h >> 15;
  if ((h & 3) == 0) delay(h >> 18);
#endif
}

// One round of the stream; false where somebody gave up.
template <class E, int OP> DEV bool run_round(const Params& P, Shared& sh, const int* stream, int round, u32 epoch) {
  const int rank = P.header[H_RANK], steps = P.header[H_STEPS];
  const bool packets = (STRETTO_SHAPES & PACKETS) && (P.header[H_USES_SLOTS] & 2);
  if (P.header[H_STARTS]) tell(P, sh, rank, P.header[H_STARTS]);
  ROLLED for (int s = 0; s < steps; s++) {
    const int* step = stream + s * STEP_WORDS;
    random_delay(P.limits, rank, s, epoch);
    if (step[S_WAITS]) {
      const int* waits = stream + step[S_WAITS_AT];
      ROLLED for (int k = THREAD; k < step[S_WAITS]; k += THREADS) wait_for(P, sh, rank, waits[2 * k], waits[2 * k + 1], s);
      MEET();
      if (sh.dead) return false;
    } else if (step[S_SHAPE] >> 16 & SYNC) {
      MEET();
    }
    run_step<E, OP>(P, sh, stream, step, s, round, epoch, packets, P.header[H_RANKS]);
    if (step[S_SIGNALS]) {
      MEET();
      tell(P, sh, rank, step[S_SIGNALS]);
    }
  }
  ROLLED for (u32 q = THREAD; q < MAX_RANKS; q += THREADS) sh.heard[q] += P.heard[q];
  return true;
}

template <class E, int OP> DEV void interpret(const Params& P, Shared& sh) {
  const int rank = P.header[H_RANK], rounds = P.header[H_ROUNDS], uses = P.header[H_USES_SLOTS];
  u32* state = P.state + BLOCK * STATE_WORDS;
  const bool inlined = STRETTO_SHAPES & INLINED, fits = !inlined && P.words <= STREAM_WORDS;
  // These loads are under way together, before the first of them is used.
  const int word = fits && THREAD < P.words ? P.stream[THREAD] : 0;
  const u32 began = state[2 * MAX_RANKS];
  u32 pending = state[2 * MAX_RANKS + 1];
  if (THREAD == 0) sh.dead = 0;
  ROLLED for (u32 q = THREAD; q < MAX_RANKS; q += THREADS) sh.heard[q] = state[q], sh.sent[q] = state[MAX_RANKS + q];
  tell_ready(P, sh, rank, P.header[H_TELL_READY]);  // A thread that cares for a peer does so throughout: no meeting.
  if (fits && THREAD < P.words) sh.stream[THREAD] = word;
  ROLLED for (u32 i = THREAD + THREADS; fits && i < P.words; i += THREADS) sh.stream[i] = P.stream[i];
  ROLLED for (u32 q = THREAD; q < MAX_RANKS; q += THREADS) sh.base[IN][q] = P.input[q], sh.base[OUT][q] = P.output[q];
  set_bases(P, sh, began + 1);
  hear_all(P, sh, rank, P.header[H_READY], 1, -1);
  MEET();
  const int* stream = STRETTO_SHAPES & INLINED ? P.inlined : fits ? sh.stream : P.stream;
  const int ranks = P.header[H_RANKS];
  const u32 all = (ranks == 32 ? ~0u : (1u << ranks) - 1) & ~(1u << rank);
  ROLLED for (int round = 0; round < rounds; round++) {
    if (round) {
      MEET();
      if (sh.dead) return;
      set_bases(P, sh, began + round + 1);
      if (!(uses && pending)) MEET();
    }
    if (uses && pending) {
      hear_all(P, sh, rank, all, 0, -2);
      MEET();
    }
    if (sh.dead) return;
    if (uses) pending = P.header[H_PENDING];
    if (!run_round<E, OP>(P, sh, stream, round, began + round + 1)) return;
  }
  if (P.header[H_DONE] | P.header[H_TELL_DONE]) {
    MEET();
    tell(P, sh, rank, P.header[H_TELL_DONE]);
    hear_all(P, sh, rank, P.header[H_DONE], 1, -3);
  }
  ROLLED for (u32 q = THREAD; q < MAX_RANKS; q += THREADS) state[q] = sh.heard[q], state[MAX_RANKS + q] = sh.sent[q];
  if (THREAD == 0 && uses) state[2 * MAX_RANKS] = began + rounds, state[2 * MAX_RANKS + 1] = pending;
}

#if !defined(STRETTO_CPU) && !(STRETTO_SHAPES & 0x1400)
extern "C" __global__ void __launch_bounds__(512, 1) stretto_run(const __grid_constant__ Params P) {
  __shared__ Shared sh;
  interpret<STRETTO_ELEMENT, STRETTO_OPERATION>(P, sh);
}
#endif

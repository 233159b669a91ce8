// SPDX-License-Identifier: Apache-2.0
// Behind kernel.cu: programs of packets alone. No signals, the stream comes with the launch, and threads rarely meet.
// The kernel's argument: little, since what comes with a launch takes time as well.
struct PacketParams {
  Limits limits;
  u32* state;
  u64 memory[QUIET_RANKS];
  u64 input, output;
  u64 packets_at, block_packets;
  u32 slot_bytes, packet_bytes;
  int rank, ranks, rounds, steps, pending, unused;
  int stream[INLINE_WORDS];
};

template <class E> DEV char* packet_address(const PacketParams& P, u64 area, const int* operand, u32 low) {
  const u32 code = operand[0], offset = operand[1], space = code >> 5;
  if (space == PACKET) return (char*)(P.memory[code & (QUIET_RANKS - 1)] + area + (u64)offset * P.packet_bytes);
  return (char*)((space == IN ? P.input : P.output) + ((u64)offset + low) * sizeof(E));
}
CALLED uint4 poll_packet(const Limits& L, const uint4* from, u32 epoch, u32 slot, int step) {
  uint4 q = ld_packet(from);
  u64 since = 0;
  ROLLED for (u32 polls = 1; q.y != epoch || q.w != epoch; polls++) {
    PAUSE();
    if ((polls & 63u) == 0 && given_up(L, polls, since)) {
      report(L, MAX_RANKS + slot, step);
      break;
    }
    q = ld_packet(from);
  }
  return q;
}
template <class E> CALLED Pack<E, 8> load_some(const char* from, long long left) { return load8<E>(from, left); }
template <class E> CALLED void store_some(char* to, Pack<E, 8> v, long long left) { store8<E>(to, v, left); }
// Whole, aligned 8 bytes are the usual case, and stand in line.
template <class E> DEV uint4 load_data(const char* from, long long left) {
  uint4 q = {0, 0, 0, 0};
  if (left >= 8 && ((u64)from & 7) == 0) {
    const uint2 d = *(const uint2*)from;
    q.x = d.x, q.z = d.y;
  } else {
    const Pack<E, 8> v = load_some<E>(from, left);
    q.x = v.w[0], q.z = v.w[1];
  }
  return q;
}
template <class E, int OP, int N>
DEV void quiet_item(const PacketParams& P, const int* at, u32 low, u32 elements, int target, int end, u32 thread, u32 threads, u64 area, u32 epoch, int n, int step) {
  const long long bytes = (long long)elements * sizeof(E);
  const u32 count = bytes ? (u32)((bytes + 7) / 8) : 1;  // An empty slice is one packet too: whoever reads it has heard of us.
  ROLLED for (u32 i = thread; i < count; i += threads) {
    const long long left = bytes - 8ll * i;
    uint4 q[N];
    UNROLL for (int k = 0; k < N; k++) {
      const char* from = packet_address<E>(P, area, at + 2 * k, low);
      if ((at[2 * k] >> 5) == PACKET) q[k] = ld_packet((const uint4*)from + i);
      else q[k] = load_data<E>(from + 8ll * i, left), q[k].y = q[k].w = epoch;
    }
    typename Element<E>::W sum[Pack<E, 8>::COUNT];
    Pack<E, 8> v;
    UNROLL for (int k = 0; k < N; k++) {
      if (q[k].y != epoch || q[k].w != epoch)
        q[k] = poll_packet(P.limits, (const uint4*)packet_address<E>(P, area, at + 2 * k, low) + i, epoch, at[2 * k + 1], step);
      v.w[0] = q[k].x, v.w[1] = q[k].z;
      if (N == 1) continue;
      if (k) add_to<E, OP, 8>(sum, v);
      else begin_sum<E, OP, 8>(sum, v);
    }
    if (N != 1) v = end_sum<E, OP, 8>(sum, n);
    const uint4 packet = {v.w[0], epoch, v.w[1], epoch};
    ROLLED for (int t = target; t < end; t++) {
      const int* operand = at + 2 * (N + t);
      char* to = packet_address<E>(P, area, operand, low);
      if ((operand[0] >> 5) == PACKET) {
        st_packet((uint4*)to + i, packet);
      } else if (left >= 8 && ((u64)(to + 8ll * i) & 7) == 0) {
        const uint2 d = {v.w[0], v.w[1]};
        *(uint2*)(to + 8ll * i) = d;
      } else {
        store_some<E>(to + 8ll * i, v, left);
      }
    }
  }
}
template <class E, int OP, int N>
DEV void quiet_if(const PacketParams& P, const int* at, u32 low, u32 elements, int sources, int target, int end, u32 thread, u32 threads, u64 area, u32 epoch, int n, int step) {
  if ((STRETTO_SHAPES & QUIET) && (STRETTO_SHAPES >> (N - 1) & 1) && sources == N)
    quiet_item<E, OP, N>(P, at, low, elements, target, end, thread, threads, area, epoch, n, step);
}
template <class E, int OP> DEV void quiet_step(const PacketParams& P, const int* step, int number, int round, u64 area, u32 epoch) {
  const int shape = step[S_SHAPE], sources = shape & 255, targets = shape >> 8 & 255, items = step[S_ITEMS];
  const int stride = 2 + 2 * (sources + targets), n = shape >> 16 & FINISH ? P.ranks : 0;
  const int* words = P.stream + step[S_AT];
  const u32 room = P.slot_bytes / sizeof(E);
  // THREADS is a power of two, and so are the threads of an item: whole warps.
  u32 bits = 31 - leading_zeros(THREADS);
  const u32 each = (words[1] * (u32)sizeof(E) + 7) / 8;
  // Of one source every target has threads of its own: a rank's first store to another one takes long to find its memory.
  const u32 parts = sources == 1 ? targets : 1, units = items * parts;
  ROLLED for (u32 other = 1; bits > WARP_BITS && (1u << (bits - 1)) >= each && other < units; other *= 2) bits--;
  ROLLED for (u32 i = THREAD >> bits; i < units; i += THREADS >> bits) {
    const u32 item = i / parts;
    const int target = (int)(i - item * parts), end = parts > 1 ? target + 1 : targets;
    const int* at = words + item * stride;
    const u32 elements = at[0], per = at[1];
    u32 low = per * BLOCK, high = low + per;
    if (high > elements) high = elements;
    low += room * round;
    u32 left = high > low ? high - low : 0;
    if (left > room) left = room;
    const u32 thread = THREAD & ((1u << bits) - 1), threads = 1u << bits;
    quiet_if<E, OP, 1>(P, at + 2, low, left, sources, target, end, thread, threads, area, epoch, n, number);
    quiet_if<E, OP, 2>(P, at + 2, low, left, sources, target, end, thread, threads, area, epoch, n, number);
    quiet_if<E, OP, 3>(P, at + 2, low, left, sources, target, end, thread, threads, area, epoch, n, number);
    quiet_if<E, OP, 4>(P, at + 2, low, left, sources, target, end, thread, threads, area, epoch, n, number);
    quiet_if<E, OP, 5>(P, at + 2, low, left, sources, target, end, thread, threads, area, epoch, n, number);
    quiet_if<E, OP, 6>(P, at + 2, low, left, sources, target, end, thread, threads, area, epoch, n, number);
    quiet_if<E, OP, 7>(P, at + 2, low, left, sources, target, end, thread, threads, area, epoch, n, number);
    quiet_if<E, OP, 8>(P, at + 2, low, left, sources, target, end, thread, threads, area, epoch, n, number);
  }
}
// A program before this one may have left slots that others still read: all that was sent so far must have come.
CALLED void wait_pending(const PacketParams& P) {
  const u32* state = P.state + BLOCK * STATE_WORDS;
  ROLLED for (int q = (int)THREAD; q < P.ranks; q += (int)THREADS) {
    if (q == P.rank) continue;
    const u32* mine = (const u32*)P.memory[P.rank] + BLOCK * MAX_RANKS + q;
    u64 since = 0;
    ROLLED for (u32 polls = 1; (int)(ld_acquire(mine) - state[q]) < 0; polls++) {
      PAUSE();
      if ((polls & 63u) == 0 && given_up(P.limits, polls, since)) return report(P.limits, q, (u32)-2);
    }
  }
}
template <class E, int OP> DEV void interpret_packets(const PacketParams& P) {
  u32* state = P.state + BLOCK * STATE_WORDS + 2 * MAX_RANKS;
  const u32 began = state[0], pending = state[1];
  ROLLED for (int round = 0; round < P.rounds; round++) {
    const u32 epoch = began + round + 1;
    const u64 area = P.packets_at + BLOCK * P.block_packets + (epoch & 1) * (P.block_packets / 2);
    if (round ? P.pending : pending) {
      wait_pending(P);
      MEET();
    }
    ROLLED for (int s = 0; s < P.steps; s++) {
      const int* step = P.stream + s * STEP_WORDS;
      random_delay(P.limits, P.rank, s, epoch);
      if (step[S_SHAPE] >> 16 & SYNC) MEET();
      quiet_step<E, OP>(P, step, s, round, area, epoch);
    }
    if (round + 1 < P.rounds) MEET();
  }
  MEET();  // All threads have read what is written now.
  if (THREAD == 0 && !ld_volatile(P.limits.abort)) state[0] = began + P.rounds, state[1] = P.pending;
}

#if !defined(STRETTO_CPU) && (STRETTO_SHAPES & 0x400)
extern "C" __global__ void __launch_bounds__(512, 1) stretto_run(const __grid_constant__ PacketParams P) {
  interpret_packets<STRETTO_ELEMENT, STRETTO_OPERATION>(P);
}
#endif

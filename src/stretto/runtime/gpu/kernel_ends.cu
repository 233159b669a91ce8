// SPDX-License-Identifier: Apache-2.0
// Behind kernel.cu: programs in symmetric memory whose ranks meet at the beginning and the end alone. Nothing is kept in
// shared memory, and the stream comes with the launch.
struct EndParams {
  Limits limits;
  u32* state;
  u64 memory[QUIET_RANKS];
  u64 input[QUIET_RANKS];
  u64 output[QUIET_RANKS];
  u32 slot_bytes;                        // of no slot: what a block moves of a chunk
  int rank, ranks, steps;
  int ready, tell_ready, done, tell_done;
  int stream[INLINE_WORDS];
};
struct Nothing {};                       // in place of `Shared`, where there are no slots

template <class E> DEV char* address(const EndParams& P, const Nothing&, const Item& item, int operand) {
  const u32 code = item.at[2 * operand], offset = item.at[2 * operand + 1];
  const u64* bases = code >> 5 == IN ? P.input : P.output;
  return (char*)(bases[code & (QUIET_RANKS - 1)] + ((u64)offset + item.low) * sizeof(E));
}

// The thread of a peer tells it of us and waits for it; what has been told and heard so far stays in registers.
struct Peer {
  u32* theirs;
  const u32* mine;
  u32 sent, heard;
};
// Whether it gave up.
DEV bool wait_end(const EndParams& P, const Peer& peer, int step) {
  u64 since = 0;
  ROLLED for (u32 polls = 1; (int)(ld_acquire(peer.mine) - peer.heard) < 0; polls++) {
    PAUSE();
    if ((polls & 63u) == 0 && given_up(P.limits, polls, since)) {
      report(P.limits, THREAD, step);
      return true;
    }
  }
  return false;
}
template <class E, int OP> DEV void end_step(const EndParams& P, const int* step) {
  const int shape = step[S_SHAPE], sources = shape & 255, targets = shape >> 8 & 255, items = step[S_ITEMS];
  const int stride = 2 + 2 * (sources + targets), n = shape >> 16 & FINISH ? P.ranks : 0;
  const int* words = P.stream + step[S_AT];
  u32 bits = 31 - leading_zeros(THREADS);
  const u32 each = (words[1] * (u32)sizeof(E) + 15) / 16;
  ROLLED for (u32 other = 1; bits > WARP_BITS && (1u << (bits - 1)) >= each && other < (u32)items; other *= 2) bits--;
  ROLLED for (u32 i = THREAD >> bits; i < (u32)items; i += THREADS >> bits) {
    const Item item = item_of<E>(P, words + i * stride, 0);
    plain_work<E, OP>(P, Nothing(), item, sources, targets, THREAD & ((1u << bits) - 1), 1u << bits, n);
  }
}
template <class E, int OP> DEV void interpret_ends(const EndParams& P) {
  const u32 q = THREAD;
  const bool cares = q < (u32)P.ranks && q != (u32)P.rank;
  bool dead = false;
  Peer peer = {0, 0, 0, 0};
  u32* state = P.state + BLOCK * STATE_WORDS + q;
  if (cares) {
    peer.heard = state[0], peer.sent = state[MAX_RANKS];
    peer.theirs = (u32*)P.memory[q] + BLOCK * MAX_RANKS + P.rank;
    peer.mine = (const u32*)P.memory[P.rank] + BLOCK * MAX_RANKS + q;
    random_delay(P.limits, P.rank, 0, peer.sent);
    if (P.tell_ready >> q & 1) st_relaxed(peer.theirs, ++peer.sent);
    if (P.ready >> q & 1) ++peer.heard, dead = wait_end(P, peer, -1);
  }
  if (MEET_ANY(dead)) return;
  ROLLED for (int s = 0; s < P.steps; s++) {
    const int* step = P.stream + s * STEP_WORDS;
    random_delay(P.limits, P.rank, s + 1, q);
    if (step[S_SHAPE] >> 16 & SYNC) MEET();
    end_step<E, OP>(P, step);
  }
  MEET();
  if (cares) {
    random_delay(P.limits, P.rank, ~0u, peer.sent);
    if (P.tell_done >> q & 1) st_release(peer.theirs, ++peer.sent);
    if (P.done >> q & 1) ++peer.heard, wait_end(P, peer, -3);
    state[0] = peer.heard, state[MAX_RANKS] = peer.sent;
  }
}

#if !defined(STRETTO_CPU) && (STRETTO_SHAPES & 0x1000)
extern "C" __global__ void __launch_bounds__(512, 1) stretto_run(const __grid_constant__ EndParams P) {
  interpret_ends<STRETTO_ELEMENT, STRETTO_OPERATION>(P);
}
#endif

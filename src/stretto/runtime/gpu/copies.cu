// SPDX-License-Identifier: Apache-2.0
// Many strided copies in one launch: of weights from a trainer's tensors into packed memory, and from the packed memory of
// other ranks into a server's tensors. Nothing waits for another rank here, so any number of blocks will do. g++ compiles
// the same for tests (native/gpu_streams.cpp does that for the interpreter), where threads run one behind the other.
#ifndef STRETTO_CPU
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEV static __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define KERNEL extern "C" __global__ void __launch_bounds__(512, 2)
#define THREAD threadIdx.x
#define THREADS blockDim.x
#define BLOCK blockIdx.x
#define BLOCKS gridDim.x
// What is copied once is not worth a place in the caches that a training step uses.
DEV uint4 load(const uint4* p) { return __ldcs(p); }
DEV void store(uint4* p, uint4 v) { __stcs(p, v); }
#endif

struct Tile {
  u64 from, to;            // addresses
  u64 from_step, to_step;  // from a row to the next
  u32 rows, row_bytes;
};
struct CopyParams {
  const Tile* tiles;
  u32 count, unused;
};

template <class V> DEV V load(const V* p) { return *p; }
template <class V> DEV void store(V* p, V v) { *p = v; }

template <class V> DEV void copy_row(const Tile& t) {
  const u32 total = t.row_bytes / sizeof(V);
  const V* from = (const V*)t.from;
  V* to = (V*)t.to;
  enum { AHEAD = 8 };
  u32 i = THREAD;
  for (; i + (AHEAD - 1) * THREADS < total; i += AHEAD * THREADS) {
    V held[AHEAD];
    UNROLL for (int k = 0; k < AHEAD; k++) held[k] = load(from + i + k * THREADS);
    UNROLL for (int k = 0; k < AHEAD; k++) store(to + i + k * THREADS, held[k]);
  }
  for (; i < total; i += THREADS) store(to + i, load(from + i));
}

template <class V> DEV void copy_rows(const Tile& t) {
  const u32 width = t.row_bytes / sizeof(V), total = t.rows * width;
  const u32 down = THREADS / width, right = THREADS % width;
  u32 row = THREAD / width, column = THREAD % width, i = THREAD;
  enum { AHEAD = 4 };
  while (i < total) {
    V held[AHEAD];
    V* to[AHEAD];
    UNROLL for (int k = 0; k < AHEAD; k++) {
      to[k] = (V*)(t.to + row * t.to_step) + column;
      if (i + k * THREADS < total) held[k] = load((const V*)(t.from + row * t.from_step) + column);
      row += down, column += right;
      if (column >= width) column -= width, row++;
    }
    UNROLL for (int k = 0; k < AHEAD; k++) {
      if (i + k * THREADS < total) store(to[k], held[k]);
    }
    i += AHEAD * THREADS;
  }
}

template <class V> DEV void copy(const Tile& t) {
  if (t.rows == 1) copy_row<V>(t);
  else copy_rows<V>(t);
}

KERNEL stretto_run(CopyParams P) {
  for (u32 at = BLOCK; at < P.count; at += BLOCKS) {
    const Tile t = P.tiles[at];
    const u64 steps = t.rows > 1 ? t.from_step | t.to_step : 0;
    const u32 bits = (u32)(t.from | t.to | steps | t.row_bytes) & 15u;
    if (bits == 0) copy<uint4>(t);
    else if ((bits & 3u) == 0) copy<u32>(t);
    else if ((bits & 1u) == 0) copy<unsigned short>(t);
    else copy<unsigned char>(t);
  }
}

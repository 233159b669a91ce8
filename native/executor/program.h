// SPDX-License-Identifier: Apache-2.0
// One rank's part of a lowered program, and its layout for a given number of elements.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"

namespace stretto::executor {

enum class Code : uint8_t { nop, s, r, rcs, rrs, rrc, rrcs, cpy, re };
inline bool receives(Code c) { return c >= Code::r && c <= Code::rrcs; }
inline bool sends(Code c) { return c == Code::s || c == Code::rcs || c == Code::rrs || c == Code::rrcs; }
inline bool reads_src(Code c) { return c == Code::s || c >= Code::rrs; }
inline bool writes_dst(Code c) { return c >= Code::r && c != Code::rrs; }

struct Instruction {
  Code code;
  bool complete;  // what it computes has every part: where an average is divided
  int32_t dep_block, dep_step;
  int32_t cast;  // sends of one value to several peers share one copy; -1: not shared
  int32_t first, last;  // its pieces
};

struct Piece {
  int8_t src_buf, dst_buf;
  int32_t src_at, dst_at;
  int32_t chunk;
};

struct Connection {
  int32_t peer;     // rank of the job
  int32_t channel;  // -1: shared memory
  int32_t ring;     // which one of those between the two ranks, over the same kind of wire
  int32_t messages;  // per slice
};

struct Block {
  int32_t out, in;  // connections, or -1
  int32_t first, last;  // its instructions
};

// What a shared copy must wait for before its memory is used again: message `order` of a slice on connection `out`.
struct CastMember {
  int32_t out, order;
};

struct Layout {
  int64_t total;
  size_t element;
  int64_t slice;  // elements of one chunk in one slice
  int64_t slices;
  std::vector<int64_t> chunk;            // elements of each chunk
  std::vector<int64_t> block_slices;     // how many slices each block goes through
  std::vector<uint64_t> out_messages, in_messages;  // of each connection, over all slices
  std::vector<int64_t> in_at, out_at;    // where each position of a buffer begins, in elements; and its end
  std::vector<size_t> out_bytes, in_bytes;  // the largest message of each connection
  std::vector<size_t> cast_bytes;
  size_t scratch_slice_bytes;
};

// Memory that a call gives for one piece of an all-to-all.
struct Extent {
  char* at;
  int64_t bytes;
};

// Elements of a rank's buffers, and how far the input begins behind the output in place.
struct Ends {
  int64_t total, inputs, outputs, place;
};

// Shared by its own count: one that Python owned would need the interpreter's lock where a thread of ours lets go of it.
struct Loaded : std::enable_shared_from_this<Loaded> {
  int comm, rank, world;
  std::vector<int> ranks;  // of the communicator, as ranks of the job
  uint64_t signature;
  uint64_t first = 0;  // the least number that a work of it may have
  uint32_t kind;
  std::string name;
  std::vector<Instruction> code;
  std::vector<Piece> piece;
  std::vector<Block> block;
  std::vector<Connection> out, in;
  std::vector<std::vector<CastMember>> cast;
  std::vector<int32_t> in_chunk, out_chunk;  // the chunk at each position
  std::vector<double> shard_share;
  int chunks_per_shard = 1;
  int num_chunks = 0;
  int scratch = 0;
  int window = 8;  // slices that scratch has room for
  int max_count = 1;
  size_t message_bytes = 0;
  bool in_place = false, combining = false;
  int64_t place = 0;
  int parts = 1;  // how many an average divides by
  bool uses_network = false;
  // An all-to-all whose pieces have the sizes that each call brings. A rank knows only its own pieces: chunk i is then its
  // i-th input, and chunk `in_chunk.size() + j` its j-th output.
  bool by_call = false;

  bool all_with_all() const { return kind >= 1 && kind <= 4; }  // no rank can be done before every rank has begun

  Ends last_ends{-1, 0, 0, 0};  // Python's, under its own lock
  std::map<std::pair<int64_t, size_t>, std::shared_ptr<const Layout>> layouts;
  std::shared_ptr<const Layout> layout(int64_t total, size_t element);
  std::shared_ptr<const Layout> last_by_call;
  std::shared_ptr<const Layout> layout(const std::vector<Extent>& gives, const std::vector<Extent>& takes);
  // How many slices of an instruction there are. By call every message but the last is full, and the last is not: so both
  // ends notice if they count on different sizes.
  int64_t slices_of(const Layout& l, const Instruction& x) const {
    return by_call ? l.chunk[static_cast<size_t>(piece[static_cast<size_t>(x.first)].chunk)] / l.slice + 1 : l.slices;
  }
  const Ends& ends(int64_t total);
  int64_t cut(int64_t total, std::vector<int64_t>& chunk) const;
  size_t slice_bytes() const;
  void measure(Layout& l) const;
};
}  // namespace stretto::executor

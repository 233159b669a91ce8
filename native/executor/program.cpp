// SPDX-License-Identifier: Apache-2.0
#include "program.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace stretto::executor {

// The elements of every chunk: shards are whole numbers of them, and chunks share what their shard has.
int64_t Loaded::cut(int64_t total, std::vector<int64_t>& chunk) const {
  chunk.resize(static_cast<size_t>(num_chunks));
  int64_t largest = 0;
  for (size_t shard = 0; shard < shard_share.size(); ++shard) {
    const double exact = shard_share[shard] * static_cast<double>(total);
    const int64_t whole = std::llround(exact);
    if (std::abs(exact - static_cast<double>(whole)) > 1e-9 * std::max(1.0, exact) + 1e-6)
      throw std::invalid_argument("count: " + std::to_string(total) + " elements cannot be cut into the shards of " + name);
    for (int64_t j = 0; j < chunks_per_shard; ++j) {
      const int64_t size = whole * (j + 1) / chunks_per_shard - whole * j / chunks_per_shard;
      chunk[shard * static_cast<size_t>(chunks_per_shard) + static_cast<size_t>(j)] = size;
      largest = std::max(largest, size);
    }
  }
  return largest;
}

const Ends& Loaded::ends(int64_t total) {
  if (last_ends.total == total) return last_ends;
  std::vector<int64_t> chunk;
  cut(total, chunk);
  Ends e{};
  int64_t at = 0;
  for (size_t i = 0; i < in_chunk.size(); at += chunk[static_cast<size_t>(in_chunk[i++])])
    if (static_cast<int64_t>(i) == -place) e.place = -at;
  e.inputs = at;
  at = 0;
  for (size_t i = 0; i < out_chunk.size(); at += chunk[static_cast<size_t>(out_chunk[i++])])
    if (static_cast<int64_t>(i) == place) e.place = at;
  e.outputs = at;
  e.total = total;
  return last_ends = e;
}

std::shared_ptr<const Layout> Loaded::layout(int64_t total, size_t element) {
  const auto key = std::make_pair(total, element);
  if (auto found = layouts.find(key); found != layouts.end()) return found->second;
  auto l = std::make_shared<Layout>();
  l->total = total;
  l->element = element;
  const int64_t largest = cut(total, l->chunk);
  l->slice = static_cast<int64_t>(slice_bytes() / element);
  l->slices = std::max<int64_t>(1, (largest + l->slice - 1) / l->slice);
  l->slice = std::min(l->slice, std::max<int64_t>(largest, 1));
  const auto ends = [&](const std::vector<int32_t>& chunks, std::vector<int64_t>& at) {
    at.assign(1, 0);
    for (int32_t c : chunks) at.push_back(at.back() + l->chunk[static_cast<size_t>(c)]);
  };
  ends(in_chunk, l->in_at);
  ends(out_chunk, l->out_at);
  measure(*l);
  if (layouts.size() >= 32) layouts.clear();
  layouts[key] = l;
  return l;
}

size_t Loaded::slice_bytes() const { return std::max<size_t>(message_bytes / static_cast<size_t>(max_count), 4096); }

// A layout for pieces of the sizes that a call brings; in bytes, since they are only moved.
std::shared_ptr<const Layout> Loaded::layout(const std::vector<Extent>& gives, const std::vector<Extent>& takes) {
  if (gives.size() != in_chunk.size() || takes.size() != out_chunk.size())
    throw std::invalid_argument("pieces: " + name + " gives " + std::to_string(in_chunk.size()) + " and takes " +
                                std::to_string(out_chunk.size()) + ", not " + std::to_string(gives.size()) + " and " +
                                std::to_string(takes.size()));
  std::vector<int64_t> sizes;
  int64_t totals[2] = {0, 0};
  for (const auto* side : {&gives, &takes})
    for (const Extent& e : *side) {
      if (e.bytes < 0 || (e.bytes && !e.at))
        throw std::invalid_argument("pieces: each needs an address and a size >= 0, not " + std::to_string(e.bytes));
      sizes.push_back(e.bytes);
      totals[side == &takes] += e.bytes;
    }
  for (const Instruction& x : code)
    if (x.code == Code::cpy) {
      const Piece& own = piece[static_cast<size_t>(x.first)];
      const int64_t given = gives[static_cast<size_t>(own.src_at)].bytes, taken = takes[static_cast<size_t>(own.dst_at)].bytes;
      if (given != taken)
        throw std::invalid_argument("pieces: what this rank keeps has " + std::to_string(given) + " bytes in the input but " +
                                    std::to_string(taken) + " in the output");
    }
  if (last_by_call && last_by_call->chunk == sizes) return last_by_call;
  auto l = std::make_shared<Layout>();
  l->total = std::max(totals[0], totals[1]);
  l->element = 1;
  l->slice = static_cast<int64_t>(slice_bytes());
  l->chunk = std::move(sizes);
  l->slices = 1;
  measure(*l);
  return last_by_call = l;
}

// What every connection, block and shared copy needs.
void Loaded::measure(Layout& l) const {
  l.scratch_slice_bytes = (static_cast<size_t>(l.slice) * l.element + 63) / 64 * 64;
  l.out_bytes.assign(out.size(), 0);
  l.in_bytes.assign(in.size(), 0);
  l.cast_bytes.assign(cast.size(), 0);
  for (const Block& b : block)
    for (int32_t k = b.first; k < b.last; ++k) {
      const Instruction& x = code[static_cast<size_t>(k)];
      size_t bytes = 0;
      for (int32_t p = x.first; p < x.last; ++p) {
        const Piece& q = piece[static_cast<size_t>(p)];
        const int64_t size = l.chunk[static_cast<size_t>(q.chunk)];
        bytes += static_cast<size_t>(std::min(size, l.slice)) * l.element;
        const auto room = [&](int8_t buffer, int32_t at) {
          if (buffer == 2) return;
          const auto& offsets = buffer == 0 ? l.in_at : l.out_at;
          const auto next = static_cast<size_t>(at) + 1;
          // In place, one name may reach into memory that only the other one has positions for.
          if (next < offsets.size() && offsets[next] - offsets[next - 1] < size)
            throw std::invalid_argument("count: " + std::to_string(l.total) + " elements: " + name +
                                        " keeps a chunk where a smaller one belongs; pad to a multiple of its chunks");
        };
        if (reads_src(x.code)) room(q.src_buf, q.src_at);
        if (writes_dst(x.code)) room(q.dst_buf, q.dst_at);
      }
      if (sends(x.code)) {
        auto& most = x.cast >= 0 ? l.cast_bytes[static_cast<size_t>(x.cast)] : l.out_bytes[static_cast<size_t>(b.out)];
        most = std::max(most, bytes);
      }
      if (receives(x.code)) {
        auto& most = l.in_bytes[static_cast<size_t>(b.in)];
        most = std::max(most, bytes);
      }
    }
  l.out_messages.assign(out.size(), 0);
  l.in_messages.assign(in.size(), 0);
  l.block_slices.assign(block.size(), l.slices);
  for (size_t i = 0; i < block.size(); ++i) {
    const Block& b = block[i];
    for (int32_t k = b.first; k < b.last; ++k) {
      const Instruction& x = code[static_cast<size_t>(k)];
      const int64_t count = x.code == Code::nop ? l.slices : slices_of(l, x);
      l.block_slices[i] = std::max(l.block_slices[i], count);
      if (sends(x.code)) l.out_messages[static_cast<size_t>(b.out)] += static_cast<uint64_t>(count);
      if (receives(x.code)) l.in_messages[static_cast<size_t>(b.in)] += static_cast<uint64_t>(count);
    }
  }
}
}  // namespace stretto::executor

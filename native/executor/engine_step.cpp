// SPDX-License-Identifier: Apache-2.0
// What a threadblock does: wait, receive, combine, send.
#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <utility>

#include "engine.h"

namespace stretto::executor {
namespace {

constexpr size_t kStream = 8 << 20;  // buffers from this size on do not stay in the cache anyway
constexpr size_t kPaced = 16 << 10;  // shorter messages are written too fast to be worth a look at the clock
constexpr size_t kBlock = 16 << 10;  // of two results of one input: the second is made while the first is in the cache

uint32_t per_kib(int64_t ns, size_t bytes) {
  return static_cast<uint32_t>(std::clamp<int64_t>(ns * 1024 / static_cast<int64_t>(bytes), 1, 1'000'000));
}

uint64_t tag_of(const Work& w, int source, int ring, uint64_t message) {
  return (static_cast<uint64_t>(w.program->comm) << 56) | (static_cast<uint64_t>(source) << 44) |
         ((w.number & 0xfff) << 32) | (static_cast<uint64_t>(ring) << 24) | (message & 0xffffff);
}
}  // namespace

bool Engine::advance(Work& w, int number) {
  const Loaded& p = *w.program;
  const Block& b = p.block[static_cast<size_t>(number)];
  BlockState& at = w.block[static_cast<size_t>(number)];
  const int64_t slices = w.layout->block_slices[static_cast<size_t>(number)];
  if (at.slice == slices) return false;
  const Instruction& x = p.code[static_cast<size_t>(b.first + at.step)];
  const int64_t slice = at.slice;
  if (p.scratch && at.step == 0 && slice >= w.oldest_slice + p.window) {
    // Scratch has room for a few slices: wait until every threadblock has left the one that was there.
    int64_t oldest = slice;
    for (const BlockState& other : w.block) oldest = std::min(oldest, other.slice);
    w.oldest_slice = oldest;
    if (slice >= oldest + p.window) return false;
  }
  if (x.dep_block >= 0) {
    const Block& other = p.block[static_cast<size_t>(x.dep_block)];
    const auto length = static_cast<uint64_t>(other.last - other.first);
    const uint64_t needed = static_cast<uint64_t>(slice) * length + static_cast<uint64_t>(x.dep_step) + 1;
    if (w.block[static_cast<size_t>(x.dep_block)].done < needed) return false;
  }
  if (x.code != Code::nop && (!p.by_call || slice < p.slices_of(*w.layout, x))) {
    const char* received = nullptr;
    char* slot = nullptr;
    bool fill = true;
    if (receives(x.code) && !(received = peek(w, b.in, x, slice))) return false;
    if (sends(x.code) && !(slot = room(w, b, x, slice, &fill))) return false;
    const size_t bytes = received || slot ? message_bytes(w, x, slice) : 0;
    const int64_t begin = w.traced ? now_ns() : 0;
    const bool timed = received && bytes >= kPaced && p.in[static_cast<size_t>(b.in)].channel < 0;
    const int64_t from = timed ? now_ns() : 0;
    Pace* pace = nullptr;
    bool past = false;
    if (x.code != Code::s)
      execute(w, x, slice, received, slot, false);
    else if (fill)
      pace = put(w, b, x, slice, slot, bytes, &past);
    if (received) release(w, b.in, timed ? per_kib(now_ns() - from, bytes) : 0);
    if (slot) publish(w, b, x, slot, bytes, pace, past);
    if (w.traced) w.trace.push_back({number, at.step, slice, begin, now_ns()});
  }
  ++at.done;
  if (b.first + ++at.step == b.last) {
    at.step = 0;
    if (++at.slice == slices) --w.unfinished;
  }
  return true;
}

const Entry& Engine::entry_of(const Work& w, int local) const {
  return segment_[static_cast<size_t>(local)].header()->board[w.program->comm][w.number % kBoardDepth];
}

// A rank that is ahead has been there.
bool Engine::meet(Work& w) {
  const std::vector<int>& ranks = w.program->ranks;
  for (; w.met < ranks.size(); ++w.met)
    if (entry_of(w, local_index_[static_cast<size_t>(ranks[w.met])]).number.load(std::memory_order_acquire) <= w.number)
      return false;
  check_boards(w);
  w.unfinished = 0;
  return true;
}

// Fills the slot of a message that is nothing but sent. Long ones inside the host: in the way that costs less, and timed.
Pace* Engine::put(Work& w, const Block& b, const Instruction& x, int64_t slice, char* slot, size_t bytes, bool* past) {
  const Connection& c = w.program->out[static_cast<size_t>(b.out)];
  if (bytes < kPaced || c.channel >= 0) {
    execute(w, x, slice, nullptr, slot, false);
    return nullptr;
  }
  Pace& pace = pace_[static_cast<size_t>(x.cast >= 0 ? own_local_ : local_index_[static_cast<size_t>(c.peer)])];
  *past = pace.past();
  const int64_t from = now_ns();
  execute(w, x, slice, nullptr, slot, *past);
  pace.wrote(*past, per_kib(now_ns() - from, bytes));
  return &pace;
}

// What a reader took for the message in a slot is known once it has given the slot back.
void Engine::learn(OutState& s, size_t slot) {
  if (Pace* pace = std::exchange(s.pace[slot], nullptr))
    if (const uint32_t took = s.ring->took[slot]) pace->read(s.past[slot], took);
}

size_t Engine::message_bytes(const Work& w, const Instruction& x, int64_t slice) const {
  const Layout& l = *w.layout;
  int64_t elements = 0;
  for (int32_t i = x.first; i < x.last; ++i) {
    const int64_t left = l.chunk[static_cast<size_t>(w.program->piece[static_cast<size_t>(i)].chunk)] - slice * l.slice;
    elements += std::clamp<int64_t>(left, 0, l.slice);
  }
  return static_cast<size_t>(elements) * l.element;
}

void Engine::execute(Work& w, const Instruction& x, int64_t slice, const char* received, char* slot, bool past) {
  const Loaded& p = *w.program;
  const Layout& l = *w.layout;
  const auto place = [&](int8_t buffer, int32_t at) -> char* {
    if (buffer == 2) {
      const auto row = static_cast<size_t>((slice % p.window) * p.scratch + at);
      return w.scratch.get() + row * l.scratch_slice_bytes;
    }
    if (p.by_call) return (buffer == 0 ? w.gives : w.takes)[static_cast<size_t>(at)].at + slice * l.slice;
    const auto& offsets = buffer == 0 ? l.in_at : l.out_at;
    char* base = buffer == 0 ? w.input : w.output;
    int64_t begin;
    if (static_cast<size_t>(at) < offsets.size()) {
      begin = offsets[static_cast<size_t>(at)];
    } else {  // in place, past the end of this name but inside the other one's memory
      const auto other = static_cast<size_t>(at + (buffer == 0 ? p.place : -p.place));
      begin = (buffer == 0 ? l.out_at : l.in_at)[other];
      base = buffer == 0 ? w.output : w.input;
    }
    return base + static_cast<size_t>(begin + slice * l.slice) * l.element;
  };
  const bool reducing = x.code == Code::rrs || x.code == Code::rrc || x.code == Code::rrcs || x.code == Code::re;
  const bool scaling = x.complete && w.scale != nullptr;
  const bool large = static_cast<size_t>(l.total) * l.element >= kStream;
  size_t message = 0;
  for (int32_t i = x.first; i < x.last; ++i) {
    const Piece& q = p.piece[static_cast<size_t>(i)];
    const int64_t left = l.chunk[static_cast<size_t>(q.chunk)] - slice * l.slice;
    const auto elements = static_cast<size_t>(std::clamp<int64_t>(left, 0, l.slice));
    const size_t bytes = elements * l.element;
    if (!bytes) continue;
    const char* mine = reads_src(x.code) ? place(q.src_buf, q.src_at) : nullptr;
    char* stored = writes_dst(x.code) ? place(q.dst_buf, q.dst_at) : nullptr;
    char* sent = slot ? slot + message : nullptr;
    const char* first = x.code == Code::re ? stored : received ? received + message : nullptr;
    message += bytes;
    char* target = stored ? stored : sent;
    char* second = stored ? sent : nullptr;
    const size_t block = second || scaling ? kBlock : bytes;
    for (size_t from = 0; from < bytes; from += block) {
      const size_t size = std::min(block, bytes - from);
      if (reducing) {
        w.reduce(target + from, first + from, mine + from, size / l.element);
        if (scaling) w.scale(target + from, size / l.element, w.factor);
      } else {
        const char* source = received ? first : mine;
        if (second) memcpy(second + from, source + from, size);
        if (target == source) continue;
        if (past || (large && stored && q.dst_buf != 2))
          kernels().stream(target + from, source + from, size);
        else
          memcpy(target + from, source + from, size);
        continue;
      }
      if (second) memcpy(second + from, target + from, size);
    }
  }
}

// Where a peer's messages will be, once it has announced the work.
bool Engine::find(Work& w, int conn) {
  const Connection& c = w.program->in[static_cast<size_t>(conn)];
  const int local = local_index_[static_cast<size_t>(c.peer)];
  const Entry& e = entry_of(w, local);
  if (e.number.load(std::memory_order_acquire) != w.number + 1) return false;
  if (e.signature != w.signature) {
    mismatch(w, c.peer, e.total, e.facts);
    return false;
  }
  Ring* first = reinterpret_cast<Ring*>(segment_[static_cast<size_t>(local)].line(e.rings[own_local_]));
  w.in[static_cast<size_t>(conn)].ring = first + c.ring;
  return true;
}

// The next message of a connection, or null: not there yet.
const char* Engine::peek(Work& w, int conn, const Instruction& x, int64_t slice) {
  const Connection& c = w.program->in[static_cast<size_t>(conn)];
  InState& s = w.in[static_cast<size_t>(conn)];
  if (c.channel < 0) {
    const Segment& from = segment_[static_cast<size_t>(local_index_[static_cast<size_t>(c.peer)])];
    if (!s.ring && !find(w, conn)) return nullptr;
    if (s.ring->head.load(std::memory_order_acquire) <= s.taken) return nullptr;
    const auto& m = s.ring->message[s.taken % kSlots];
    const size_t expected = message_bytes(w, x, slice);
    if (m.nbytes != expected || size_t{m.at} * kLine + m.nbytes > from.size()) {
      fail(w, Failure::mismatch, c.peer, wrong_length(w, c.peer, slice, m.nbytes, expected), true);
      return nullptr;
    }
    return from.line(m.at);
  }
  Transfer& t = s.transfers[s.taken % kSlots];
  if (!t.done) return nullptr;
  const size_t expected = message_bytes(w, x, slice);
  if (t.failed || t.length != expected) {
    fail(w, t.failed ? Failure::peer_lost : Failure::mismatch, c.peer,
         t.failed ? describe(w) + ": rank " + std::to_string(c.peer) + " could not be received from"
                  : wrong_length(w, c.peer, slice, t.length, expected),
         true);
    return nullptr;
  }
  return t.bytes.get();
}

void Engine::release(Work& w, int conn, uint32_t took) {
  const Connection& c = w.program->in[static_cast<size_t>(conn)];
  InState& s = w.in[static_cast<size_t>(conn)];
  const uint64_t taken = s.taken++;
  if (c.channel < 0) {
    s.ring->took[taken % kSlots] = took;
    if (s.total <= kSlots) {  // every message has a slot of its own: nobody waits for one
      s.ring->tail.store(s.taken, std::memory_order_release);
      return;
    }
    s.ring->tail.store(s.taken, std::memory_order_seq_cst);
    if (s.ring->wants_room.load(std::memory_order_seq_cst) && s.ring->wants_room.exchange(0)) {
      to_ring_ |= uint64_t{1} << local_index_[static_cast<size_t>(c.peer)];
      ring();
    }
    return;
  }
  if (s.posted < s.total) post(w, conn, taken % kSlots);
}

void Engine::post(Work& w, int conn, uint64_t slot) {
  const Connection& c = w.program->in[static_cast<size_t>(conn)];
  InState& s = w.in[static_cast<size_t>(conn)];
  networks_[static_cast<size_t>(c.channel)]->receive(s.transfers[slot], w.layout->in_bytes[static_cast<size_t>(conn)],
                                                    tag_of(w, c.peer, c.ring, s.posted));
  ++s.posted;
}

// Where the next message of a connection may be written, or null: the receiver has to catch up.
char* Engine::room(Work& w, const Block& b, const Instruction& x, int64_t slice, bool* fill) {
  const Connection& c = w.program->out[static_cast<size_t>(b.out)];
  OutState& s = w.out[static_cast<size_t>(b.out)];
  if (c.channel >= 0) {
    Transfer& t = s.transfers[s.sent % kSlots];
    return t.busy ? nullptr : t.bytes.get();
  }
  const auto free = [](Ring* r, uint64_t consumed) {
    if (r->tail.load(std::memory_order_acquire) >= consumed) return true;
    r->wants_room.store(1, std::memory_order_seq_cst);
    return r->tail.load(std::memory_order_seq_cst) >= consumed;
  };
  if (s.sent >= kSlots && !free(s.ring, s.sent - kSlots + 1)) return nullptr;
  learn(s, s.sent % kSlots);
  if (x.cast < 0) return s.slots + (s.sent % kSlots) * s.slot_bytes;
  CastState& cast = w.cast[static_cast<size_t>(x.cast)];
  *fill = cast.filled <= slice;
  if (*fill && slice >= kSlots)
    for (const CastMember& m : w.program->cast[static_cast<size_t>(x.cast)]) {
      const auto messages = static_cast<uint64_t>(w.program->out[static_cast<size_t>(m.out)].messages);
      const uint64_t consumed = static_cast<uint64_t>(slice - kSlots) * messages + static_cast<uint64_t>(m.order) + 1;
      if (!free(w.out[static_cast<size_t>(m.out)].ring, consumed)) return nullptr;
    }
  if (*fill) cast.filled = slice + 1;
  return cast.slots + static_cast<size_t>(slice % kSlots) * cast.slot_bytes;
}

void Engine::publish(Work& w, const Block& b, const Instruction&, char* slot, size_t bytes, Pace* pace, bool past) {
  const Connection& c = w.program->out[static_cast<size_t>(b.out)];
  OutState& s = w.out[static_cast<size_t>(b.out)];
  if (c.channel < 0) {
    s.pace[s.sent % kSlots] = pace;
    s.past[s.sent % kSlots] = past;
    s.ring->message[s.sent % kSlots] = {own_->line_of(slot), static_cast<uint32_t>(bytes)};
    s.ring->head.store(++s.sent, std::memory_order_release);
    to_ring_ |= uint64_t{1} << local_index_[static_cast<size_t>(c.peer)];
    if (bytes >= kPaced) ring();  // short ones: together with others, since a fence waits for everything written before
    return;
  }
  networks_[static_cast<size_t>(c.channel)]->send(s.transfers[s.sent % kSlots], bytes, c.peer,
                                                 tag_of(w, set_.rank, c.ring, s.sent));
  ++s.sent;
}

void Engine::ring() {
  if (!to_ring_) return;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (uint64_t left = std::exchange(to_ring_, 0); left; left &= left - 1) {
    const auto local = static_cast<size_t>(std::countr_zero(left));
    Bell& bell = segment_[local].header()->bell;
    uint32_t how = bell.asleep.load(std::memory_order_relaxed);
    if (!how || !bell.asleep.compare_exchange_strong(how, 0)) continue;
    ++rings_;
    wake(bell, how, set_.bells[local]);
  }
}
}  // namespace stretto::executor

// SPDX-License-Identifier: Apache-2.0
// The verifier's kernel: events on memory locations, executed symbolically along the happens-before order.
//
// An event may receive a message, read one or two locations, write one, and send a message, item by item:
//   value := message + [rd] + [rd2];  [wr] := value;  sent := value      (each part only where present)
// A value is a chunk and the set of parts summed into it. Whatever order a race-free program runs in, every read
// sees the same value, so one linear extension of the order proves them all; races are found by asking, for each
// two accesses that do not commute, whether one happens before the other.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <tuple>

#include "arrays.h"
#include "lists.h"

namespace stretto {
namespace {

enum Code : int { kUndefined, kTwice, kMixed, kRaceRead, kRaceWrite, kMissing, kWrong };

constexpr int32_t kNothing = -1, kPoison = -2;                    // in place of a chunk
constexpr int32_t kNoSet = std::numeric_limits<int32_t>::min();  // in place of a set (which may be negative)
constexpr size_t kMostErrors = 16;

using Error = std::tuple<int, int64_t, int64_t, int64_t, int64_t, int64_t>;  // code, event, other, loc, chunk, part

// Successor lists of a graph given by predecessors, and Kahn's order over it.
struct Order {
  std::vector<int32_t> sequence, waiting;
  std::vector<int32_t> extra_from, extra_to;

  bool sort(int32_t n, const Rows<int32_t>& preds) {
    std::vector<int64_t> ptr(n + 1, 0);
    waiting.assign(n, 0);
    auto each = [&](auto&& visit) {
      for (int32_t e = 0; e < n; e++)
        for (const int32_t* p = preds.begin(e); p != preds.end(e); p++) visit(*p, e);
      for (size_t i = 0; i < extra_from.size(); i++) visit(extra_from[i], extra_to[i]);
    };
    each([&](int32_t a, int32_t b) { ptr[a + 1]++, waiting[b]++; });
    for (int32_t e = 0; e < n; e++) ptr[e + 1] += ptr[e];
    std::vector<int32_t> next(ptr[n]);
    each([&](int32_t a, int32_t b) { next[ptr[a]++] = b; });
    for (int32_t e = n; e > 0; e--) ptr[e] = ptr[e - 1];  // filling moved each start to its end
    ptr[0] = 0;
    sequence.clear();
    sequence.reserve(n);
    for (int32_t e = 0; e < n; e++)
      if (!waiting[e]) sequence.push_back(e);
    for (size_t head = 0; head < sequence.size(); head++)
      for (int64_t i = ptr[sequence[head]]; i < ptr[sequence[head] + 1]; i++)
        if (--waiting[next[i]] == 0) sequence.push_back(next[i]);
    return (int32_t)sequence.size() == n;
  }

  // After a failed sort: events that wait for one another in a circle.
  std::vector<int64_t> cycle(int32_t n, const Rows<int32_t>& preds) const {
    std::vector<std::vector<int32_t>> more(n);
    for (size_t i = 0; i < extra_from.size(); i++) more[extra_to[i]].push_back(extra_from[i]);
    auto blocker = [&](int32_t e) {
      for (const int32_t* p = preds.begin(e); p != preds.end(e); p++)
        if (waiting[*p]) return *p;
      for (int32_t p : more[e])
        if (waiting[p]) return p;
      return kNothing;
    };
    int32_t e = 0;
    while (!waiting[e]) e++;
    std::vector<int32_t> seen(n, 0);
    while (!seen[e]) seen[e] = 1, e = blocker(e);
    std::vector<int64_t> found;
    for (int32_t first = e;;) {
      found.push_back(e);
      if ((e = blocker(e)) == first) break;
    }
    std::reverse(found.begin(), found.end());
    return found;
  }
};

// Sets of parts, shared and counted. A set of one part p is written ~p and takes no memory.
class Sets {
 public:
  explicit Sets(int64_t parts) : words_((size_t)(parts + 63) / 64) {}

  void keep(int32_t s) {
    if (s >= 0) uses_[s]++;
  }
  void drop(int32_t s) {
    if (s >= 0 && --uses_[s] == 0) free_.push_back(s);
  }
  // The union, or the first part that both contain (in `twice`).
  int32_t join(int32_t a, int32_t b, int32_t& twice) {
    twice = kNothing;
    if (a < 0 && b < 0 && a == b) {
      twice = ~a;
      return a;
    }
    if (a < 0) std::swap(a, b);
    if (a >= 0 && b < 0 && has(a, ~b)) {
      twice = ~b;
      return keep(a), a;
    }
    int32_t s = fresh();
    uint64_t* out = bits(s);
    if (a >= 0) {
      std::copy_n(bits(a), words_, out);
    } else {
      out[~a / 64] |= uint64_t(1) << (~a % 64);
    }
    if (b >= 0) {
      const uint64_t* other = bits(b);
      for (size_t w = 0; w < words_; w++) {
        if (uint64_t both = out[w] & other[w]; both && twice < 0) twice = (int32_t)(w * 64 + std::countr_zero(both));
        out[w] |= other[w];
      }
    } else {
      out[~b / 64] |= uint64_t(1) << (~b % 64);
    }
    return s;
  }
  bool has(int32_t s, int32_t part) const {
    return s < 0 ? ~s == part : pool_[(size_t)s * words_ + part / 64] >> (part % 64) & 1;
  }
  int64_t size(int32_t s) const {
    if (s < 0) return 1;
    int64_t total = 0;
    for (size_t w = 0; w < words_; w++) total += std::popcount(pool_[(size_t)s * words_ + w]);
    return total;
  }
  int32_t first_outside(int32_t s, const int32_t* begin, const int32_t* end) const {  // a part that is not listed
    for (int32_t p = 0; p < (int32_t)words_ * 64; p++)
      if (has(s, p) && !std::binary_search(begin, end, p)) return p;
    return kNothing;
  }

 private:
  int32_t fresh() {
    int32_t s;
    if (!free_.empty()) {
      s = free_.back();
      free_.pop_back();
      std::fill_n(bits(s), words_, 0);
      uses_[s] = 1;
    } else {
      s = (int32_t)uses_.size();
      uses_.push_back(1);
      pool_.resize(pool_.size() + words_, 0);
    }
    return s;
  }
  uint64_t* bits(int32_t s) { return pool_.data() + (size_t)s * words_; }

  size_t words_;
  std::vector<uint64_t> pool_;
  std::vector<int32_t> uses_, free_;
};

struct Value {
  int32_t chunk = kNothing, set = kNoSet;
};

struct Location {
  Value value;
  int32_t began = -1, writers = -1, readers = -1;  // heads of event lists
  int32_t reads_left = 0;
  bool reduced = false;
};

struct Input {
  int32_t num_events;
  const int32_t *thread, *pop, *push, *rd, *rd2, *wr;
  Rows<int32_t> preds;
  const int64_t* item_ptr;
  bool reductions_commute;
};

class Checker {
 public:
  Checker(const Input& in, int64_t locations, int64_t parts, const std::vector<int32_t>& sequence)
      : in_(in), at_(locations), sets_(parts), sequence_(sequence), position_(in.num_events), seen_(in.num_events, -1) {
    for (int32_t i = 0; i < in.num_events; i++) position_[sequence[i]] = i;
    for (int64_t i = 0; i < in.item_ptr[in.num_events]; i++) {
      if (in.rd[i] >= 0) at_[in.rd[i]].reads_left++;
      if (in.rd2[i] >= 0) at_[in.rd2[i]].reads_left++;
    }
  }

  void start(int32_t loc, int32_t chunk, int32_t part) { at_[loc].value = {chunk, ~part}; }
  void need_at_end(int32_t loc) { at_[loc].reads_left++; }

  void run(int64_t num_messages) {
    std::vector<Value> narrow(num_messages);  // messages of one item, and of several
    bool any_wide = false;
    for (int32_t e = 0; e < in_.num_events; e++) any_wide |= in_.item_ptr[e + 1] - in_.item_ptr[e] > 1;
    std::vector<std::vector<Value>> wide(any_wide ? num_messages : 0);
    for (int32_t e : sequence_) {
      int64_t first = in_.item_ptr[e], count = in_.item_ptr[e + 1] - first;
      int32_t pop = in_.pop[e], push = in_.push[e];
      std::vector<Value> arrived;
      if (pop >= 0 && count > 1) arrived.swap(wide[pop]);
      if (push >= 0 && count > 1) wide[push].resize(count);
      for (int64_t i = 0; i < count; i++) {
        Value value;
        bool have = false;
        if (pop >= 0) value = count == 1 ? narrow[pop] : arrived[i], have = true;
        for (int32_t loc : {in_.rd[first + i], in_.rd2[first + i]}) {
          if (loc < 0) continue;
          // A reduction into a location reads what it then writes: it is judged as a write below.
          bool own = in_.reductions_commute && pop >= 0 && loc == in_.wr[first + i];
          Value local = read(e, loc, !own);
          value = have ? add(e, loc, value, local) : local;
          have = true;
        }
        int32_t wr = in_.wr[first + i];
        if (push >= 0) {
          sets_.keep(value.set);
          (count == 1 ? narrow[push] : wide[push][i]) = value;
        }
        if (wr >= 0)
          write(e, wr, value, in_.rd[first + i] == wr || in_.rd2[first + i] == wr);
        else
          sets_.drop(value.set);
      }
    }
  }

  // Whether the location holds the chunk with exactly the listed parts at the end.
  void finish(int32_t loc, int32_t chunk, const int32_t* parts, const int32_t* parts_end, int32_t& known_good) {
    Value v = at_[loc].value;
    if (v.chunk == kPoison) return;
    if (v.chunk == kNothing) return error(kMissing, -1, -1, loc, chunk, -1);
    if (v.chunk != chunk) return error(kWrong, -1, v.chunk, loc, chunk, -1);
    if (v.set >= 0 && v.set == known_good) return;
    for (const int32_t* p = parts; p != parts_end; p++)
      if (!sets_.has(v.set, *p)) return error(kMissing, -1, -1, loc, chunk, *p);
    if (sets_.size(v.set) != parts_end - parts)
      return error(kWrong, -1, -1, loc, chunk, sets_.first_outside(v.set, parts, parts_end));
    known_good = v.set;
  }

  std::vector<Error> errors;
  int64_t num_errors = 0, redundant = 0;
  int32_t redundant_event = kNothing;

 private:
  void error(int code, int64_t event, int64_t other, int64_t loc, int64_t chunk, int64_t part) {
    if (errors.size() < kMostErrors) errors.emplace_back(code, event, other, loc, chunk, part);
    num_errors++;
  }

  bool before(int32_t a, int32_t e) {
    if (a == e) return true;
    auto reaches = [&](int32_t v) { return v == a || (in_.thread[a] >= 0 && in_.thread[v] == in_.thread[a]); };
    if (in_.thread[a] >= 0 && in_.thread[a] == in_.thread[e]) return true;
    for (const int32_t* p = in_.preds.begin(e); p != in_.preds.end(e); p++)
      if (*p == a) return true;
    frontier_.assign(1, e);
    stamp_++;
    for (size_t head = 0; head < frontier_.size(); head++)
      for (const int32_t* p = in_.preds.begin(frontier_[head]); p != in_.preds.end(frontier_[head]); p++) {
        // Only events after `a` in the linear extension can have it among their predecessors.
        if (position_[*p] < position_[a] || seen_[*p] == stamp_) continue;
        if (reaches(*p)) return true;
        seen_[*p] = stamp_;
        frontier_.push_back(*p);
      }
    return false;
  }

  Value read(int32_t e, int32_t loc, bool check) {
    Location& l = at_[loc];
    if (check) {
      lists_.each(l.writers, [&](int32_t w) {
        if (!before(w, e)) error(kRaceRead, e, w, loc, l.value.chunk, -1);
      });
      lists_.push(l.readers, e);
    }
    Value v = l.value;
    if (v.chunk == kNothing) {
      error(kUndefined, e, -1, loc, -1, -1);
      v.chunk = kPoison;
    }
    if (--l.reads_left == 0)
      l.value.set = kNoSet;  // nobody will look again: hand over our share of the set
    else
      sets_.keep(v.set);
    return v;
  }

  Value add(int32_t e, int32_t loc, Value a, Value b) {
    if (a.chunk == kPoison || b.chunk == kPoison) return sets_.drop(a.set), sets_.drop(b.set), Value{kPoison, kNoSet};
    if (a.chunk != b.chunk) {
      error(kMixed, e, a.chunk, loc, b.chunk, -1);
      return sets_.drop(a.set), sets_.drop(b.set), Value{kPoison, kNoSet};
    }
    int32_t twice;
    int32_t set = sets_.join(a.set, b.set, twice);
    if (twice >= 0) error(kTwice, e, -1, loc, a.chunk, twice);
    sets_.drop(a.set), sets_.drop(b.set);
    return {twice >= 0 ? kPoison : a.chunk, set};
  }

  void write(int32_t e, int32_t loc, Value value, bool reduction) {
    Location& l = at_[loc];
    bool commutes = reduction && in_.reductions_commute;
    auto check = [&](int32_t list) {
      lists_.each(list, [&](int32_t other) {
        if (other != e && !before(other, e)) error(kRaceWrite, e, other, loc, value.chunk, -1);
      });
    };
    if (l.readers >= 0)
      check(l.readers);  // the readers came after the writers, so this orders both
    else if (!commutes || !l.reduced)
      check(l.writers);
    if (commutes) {
      if (l.readers >= 0) {
        lists_.clear(l.began), lists_.clear(l.writers);
        l.began = l.readers, l.readers = -1;
      } else if (!l.reduced) {
        lists_.clear(l.began);
        l.began = l.writers, l.writers = -1;
      } else {
        check(l.began);
      }
    } else {
      lists_.clear(l.began), lists_.clear(l.writers), lists_.clear(l.readers);
      if (!reduction && l.value.chunk == value.chunk && l.value.set == value.set && value.set != kNoSet) {
        redundant++;
        redundant_event = e;
      }
    }
    l.reduced = commutes;
    lists_.push(l.writers, e);
    sets_.drop(l.value.set);
    l.value = value;
    if (l.reads_left == 0) sets_.drop(l.value.set), l.value.set = kNoSet;
  }

  const Input& in_;
  std::vector<Location> at_;
  Sets sets_;
  Lists lists_;
  const std::vector<int32_t>& sequence_;
  std::vector<int32_t> position_, seen_, frontier_;
  int32_t stamp_ = 0;
};

// Adds what a FIFO connection of the given depth makes wait: order, and room.
void add_fifo_edges(Order& order, const Rows<int32_t>& connections, int64_t num_connections,
                    const std::vector<int32_t>& push_event, const std::vector<int32_t>& pop_event, int64_t depth) {
  for (int64_t c = 0; c < num_connections; c++) {
    const int32_t* m = connections.begin(c);
    int64_t count = connections.size(c);
    auto edge = [&](int32_t from, int32_t to) {
      if (from != to) order.extra_from.push_back(from), order.extra_to.push_back(to);
    };
    for (int64_t j = 1; j < count; j++) {
      edge(push_event[m[j - 1]], push_event[m[j]]);
      edge(pop_event[m[j - 1]], pop_event[m[j]]);
    }
    for (int64_t j = depth; j < count; j++) edge(pop_event[m[j - depth]], push_event[m[j]]);
  }
}

nb::object check_events(int64_t num_locations, int64_t num_parts, bool reductions_commute, In<int32_t> thread,
                        In<int32_t> pop, In<int32_t> push, In<int64_t> item_ptr, In<int32_t> rd, In<int32_t> rd2,
                        In<int32_t> wr, In<int64_t> pred_ptr, In<int32_t> pred, In<int64_t> conn_ptr,
                        In<int32_t> conn, In<int32_t> init_loc, In<int32_t> init_chunk, In<int32_t> init_part,
                        In<int32_t> post_loc, In<int32_t> post_chunk, In<int32_t> post_set, In<int64_t> set_ptr,
                        In<int32_t> set_part) {
  Input in{(int32_t)thread.shape(0), thread.data(), pop.data(), push.data(), rd.data(), rd2.data(), wr.data(),
           {pred_ptr.data(), pred.data()}, item_ptr.data(), reductions_commute};
  std::vector<Error> errors;
  std::vector<int64_t> cycle;
  int64_t num_errors = 0, redundant = 0, depth = 0;
  int32_t redundant_event = kNothing;
  {
    nb::gil_scoped_release release;
    int64_t messages = 0;
    for (int32_t e = 0; e < in.num_events; e++) messages = std::max<int64_t>(messages, std::max(pop.data()[e], push.data()[e]) + 1);
    std::vector<int32_t> push_event(messages, kNothing), pop_event(messages, kNothing);
    for (int32_t e = 0; e < in.num_events; e++) {
      if (push.data()[e] >= 0) push_event[push.data()[e]] = e;
      if (pop.data()[e] >= 0) pop_event[pop.data()[e]] = e;
    }
    // An order that also respects bounded FIFOs is a linear extension like any other, so it serves for the proof.
    std::vector<int32_t> sequence;
    for (int64_t d : {1, 2, 0}) {
      Order order;
      if (d) add_fifo_edges(order, {conn_ptr.data(), conn.data()}, (int64_t)conn_ptr.shape(0) - 1, push_event, pop_event, d);
      if (order.sort(in.num_events, in.preds)) {
        depth = d;
        sequence = std::move(order.sequence);
        break;
      }
      if (d != 1) cycle = order.cycle(in.num_events, in.preds);
    }
    if ((int32_t)sequence.size() == in.num_events) {
      Checker checker(in, num_locations, num_parts, sequence);
      for (size_t i = 0; i < init_loc.shape(0); i++)
        checker.start(init_loc.data()[i], init_chunk.data()[i], init_part.data()[i]);
      for (size_t i = 0; i < post_loc.shape(0); i++) checker.need_at_end(post_loc.data()[i]);
      checker.run(messages);
      Rows<int32_t> sets{set_ptr.data(), set_part.data()};
      std::vector<int32_t> known_good(set_ptr.shape(0), kNoSet);
      for (size_t i = 0; i < post_loc.shape(0); i++) {
        int32_t s = post_set.data()[i];
        checker.finish(post_loc.data()[i], post_chunk.data()[i], sets.begin(s), sets.end(s), known_good[s]);
      }
      errors = std::move(checker.errors);
      num_errors = checker.num_errors, redundant = checker.redundant, redundant_event = checker.redundant_event;
    }
  }
  return nb::make_tuple(errors, num_errors, cycle, depth, redundant, redundant_event);
}

}  // namespace

void bind_check(nb::module_& m) {
  m.def("check_events", &check_events, nb::arg("num_locations"), nb::arg("num_parts"), nb::arg("reductions_commute"),
        nb::arg("thread"), nb::arg("pop"), nb::arg("push"), nb::arg("item_ptr"), nb::arg("rd"), nb::arg("rd2"),
        nb::arg("wr"), nb::arg("pred_ptr"), nb::arg("pred"), nb::arg("conn_ptr"), nb::arg("conn"), nb::arg("init_loc"),
        nb::arg("init_chunk"), nb::arg("init_part"), nb::arg("post_loc"), nb::arg("post_chunk"), nb::arg("post_set"),
        nb::arg("set_ptr"), nb::arg("set_part"));
}
}  // namespace stretto

// SPDX-License-Identifier: Apache-2.0
// An all-reduce as a timetable: pieces are put one by one into the free time of links, each along a pair of trees of its own;
// an all-gather has the second tree of each pair only, from the rank whose piece it is.
//
// The time of each link is cut into slots, in which it moves one piece. For a root and a moment at which the root knows a
// piece's sum, the tree that gathers is grown backwards in time from there, each rank sending as late as free slots allow,
// and the tree that spreads forwards. Where every rank's only link to a place is its own, that finds a pair of trees whenever
// there is one; prices keep trees away from links that are nearly full. Pieces that do not fit are put in after some others
// are taken out and put back elsewhere (ruin and recreate).
#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <random>
#include <stdexcept>

#include "arrays.h"

namespace stretto {
namespace {

constexpr double kTiny = 1e-9;
constexpr double kNever = 1e300;
constexpr double kSteep = 20.0;     // how fast the price of a link falls with the share of its slots that are free
constexpr double kCompact = 0.02;   // what a microsecond of delay counts beside prices where pairs of trees are compared

// Which slots of each link are taken.
class Slots {
 public:
  std::vector<int32_t> count, taken;

  Slots(const double* slot_us, const double* tail_us, int64_t links, double until) : count(links), taken(links, 0) {
    int32_t most = 1;
    for (int64_t l = 0; l < links; l++) {
      double fit = std::floor((until - tail_us[l]) / slot_us[l] + kTiny);
      if (fit > 1 << 22) throw std::invalid_argument("timetable: too many slots");
      most = std::max(most, count[l] = std::max(0, (int32_t)fit));
    }
    words_ = most / 64 + 1;
    bits_.assign((size_t)links * words_, 0);
  }

  // The last free slot up to s, the first free one from s on; -1 where there is none.
  int32_t last(int32_t l, int64_t s) const {
    s = std::min<int64_t>(s, count[l] - 1);
    if (s < 0) return -1;
    const uint64_t* bits = &bits_[(size_t)l * words_];
    int64_t w = s >> 6;
    uint64_t free = ~bits[w] & (~0ull >> (63 - (s & 63)));
    while (!free && w > 0) free = ~bits[--w];
    return free ? (int32_t)(w * 64 + 63 - std::countl_zero(free)) : -1;
  }

  int32_t first(int32_t l, int64_t s) const {
    s = std::max<int64_t>(s, 0);
    if (s >= count[l]) return -1;
    const uint64_t* bits = &bits_[(size_t)l * words_];
    int64_t w = s >> 6, end = (count[l] - 1) >> 6;
    uint64_t free = ~bits[w] & (~0ull << (s & 63));
    while (!free && w < end) free = ~bits[++w];
    int64_t found = free ? w * 64 + std::countr_zero(free) : count[l];
    return found < count[l] ? (int32_t)found : -1;
  }

  void take(int32_t l, int32_t s) { bits_[(size_t)l * words_ + (s >> 6)] |= 1ull << (s & 63), taken[l]++; }
  void leave(int32_t l, int32_t s) { bits_[(size_t)l * words_ + (s >> 6)] &= ~(1ull << (s & 63)), taken[l]--; }

 private:
  int64_t words_;
  std::vector<uint64_t> bits_;
};

// One rank's part of a tree: the link to (from) its parent, and the slot there. Of the root: link -1.
struct Step {
  int32_t link = -1, slot = 0;
};

struct Pair {
  bool placed = false;
  double meet = 0;  // when the root knows the sum
  std::vector<Step> gather, spread;
};

class Timetable {
 public:
  int32_t n;
  const int32_t *src, *dst;
  const double *slot_us, *tail_us;
  double extra_us, until, full_us;  // full_us: what a full link costs, as a delay
  Slots slots;
  std::vector<std::vector<int32_t>> in, out;
  std::vector<double> price, before, behind;  // of each root: the least time to gather, and to spread
  std::mt19937_64 draw;
  int32_t placed = 0, total = 1;
  int64_t insertions = 0;
  const int32_t* home = nullptr;  // the root of each piece, where pieces only spread from one
  std::vector<Pair> pairs;

  Timetable(int32_t ranks, In<int32_t>& link_src, In<int32_t>& link_dst, const double* slot, const double* tail,
            double extra, double end, double full, uint64_t seed)
      : n(ranks), src(link_src.data()), dst(link_dst.data()), slot_us(slot), tail_us(tail), extra_us(extra), until(end), full_us(full),
        slots(slot, tail, (int64_t)link_src.shape(0), end), in(ranks), out(ranks), price(link_src.shape(0), 0.0),
        before(ranks), behind(ranks), draw(seed), at_(ranks), key_(ranks), done_(ranks) {
    for (int32_t l = 0; l < (int32_t)link_src.shape(0); l++) in[dst[l]].push_back(l), out[src[l]].push_back(l);
    std::vector<Step> tree(n);
    for (int32_t r = 0; r < n; r++) {
      before[r] = grow(r, until, true, tree, kNever) < kNever ? until - *std::min_element(at_.begin(), at_.end()) : kNever;
      behind[r] = grow(r, 0.0, false, tree, kNever) < kNever ? *std::max_element(at_.begin(), at_.end()) : kNever;
    }
  }

  // Put a piece in at the best of some roots and moments; false where it fits at none of them.
  bool insert(int32_t piece, int32_t tries) {
    Pair& pair = pairs[piece];
    insertions++;
    set_prices();
    double least = kNever;
    trial_.gather.resize(n), trial_.spread.resize(n);
    for (int32_t k = 0; k < tries; k++) {
      auto root = home ? home[piece] : (int32_t)(draw() % n);
      double from = home ? 0.0 : before[root], to = until - behind[root];
      if (to < from) continue;
      trial_.meet = from + (to - from) * chance();
      // A tree that makes the pair cost too much is not grown to its end.
      double cost = home ? 0.0 : grow(root, trial_.meet, true, trial_.gather, least);
      if (cost < least) cost += grow(root, trial_.meet, false, trial_.spread, least - cost);
      if (cost < least) least = cost, std::swap(pair.meet, trial_.meet), std::swap(pair.gather, trial_.gather), std::swap(pair.spread, trial_.spread);
      trial_.gather.resize(n), trial_.spread.resize(n);
    }
    if (least == kNever) return false;
    take(pair);
    return true;
  }

  void take(Pair& pair) {
    for (auto* tree : {&pair.gather, &pair.spread})
      for (auto& step : *tree)
        if (step.link >= 0) slots.take(step.link, step.slot);
    pair.placed = true, placed++;
  }

  void leave(Pair& pair) {
    if (!pair.placed) return;
    for (auto* tree : {&pair.gather, &pair.spread})
      for (auto& step : *tree)
        if (step.link >= 0) slots.leave(step.link, step.slot);
    pair.placed = false, placed--;
  }

  double chance() { return (double)(draw() >> 11) * 0x1p-53; }

  // Place all pieces; those that do not fit after `most` insertions are returned.
  std::vector<int32_t> fill(int32_t pieces, int32_t tries, double ruin, int64_t most) {
    pairs.resize(pieces), total = pieces;
    std::vector<int32_t> waiting;
    for (int32_t p = 0; p < pieces; p++)
      if (!insert(p, tries)) waiting.push_back(p);
    while (!waiting.empty() && placed > 0 && insertions < most) {
      auto removed = chosen(1 + (int32_t)(chance() * ruin * pieces));
      std::vector<Pair> kept;
      for (int32_t p : removed) kept.push_back(pairs[p]), leave(pairs[p]);
      auto first = (int64_t)waiting.size();
      auto turn = waiting;
      turn.insert(turn.end(), removed.begin(), removed.end());
      std::shuffle(turn.begin() + (chance() < 0.5 ? 0 : first), turn.end(), draw);
      std::vector<int32_t> left;
      for (int32_t p : turn)
        if (!insert(p, tries)) left.push_back(p);
      if ((int64_t)left.size() <= first) {
        waiting = left;
        continue;
      }
      for (int32_t p : turn) leave(pairs[p]);
      for (size_t k = 0; k < removed.size(); k++) pairs[removed[k]] = kept[k], pairs[removed[k]].placed = false, take(pairs[removed[k]]);
    }
    return waiting;
  }

 private:
  std::vector<double> at_, key_;
  std::vector<uint8_t> done_;
  std::vector<int32_t> reached_;
  Pair trial_;

  // Links are priced by the share of their slots that all pieces together will have taken.
  void set_prices() {
    double more = (double)total / std::max(placed, 1);
    for (size_t l = 0; l < price.size(); l++) {
      double full = std::min(1.0, more * slots.taken[l] / std::max(1, slots.count[l]));
      price[l] = full_us * std::exp(kSteep * (full - 1));
    }
  }

  // Let rank v join the tree by a link to (from) one that is in it, if that is better than what v has.
  void offer(int32_t v, double by, int32_t l, bool gathers, Step& step) {
    double us = slot_us[l], at;
    int32_t slot;
    if (gathers) {  // as late as it has arrived in time
      slot = slots.last(l, (int64_t)std::floor((by - extra_us - tail_us[l] - us) / us + kTiny));
      at = slot * us;
    } else {
      slot = slots.first(l, (int64_t)std::ceil(by / us - kTiny));
      at = (slot + 1) * us + tail_us[l];
    }
    if (slot < 0 || (!gathers && at > until + kTiny)) return;
    double key = (gathers ? -at : at) + price[l];
    if (key >= key_[v]) return;
    if (key_[v] == kNever) reached_.push_back(v);
    key_[v] = key, at_[v] = at, step = {l, slot};
  }

  // Grow a tree from the root and return what it costs; kNever where it does not reach every rank, or costs more than `most`.
  // No two of its sends need the same slot, as every rank has links of its own; so none is taken yet.
  double grow(int32_t root, double meet, bool gathers, std::vector<Step>& tree, double most) {
    std::fill(key_.begin(), key_.end(), kNever), std::fill(done_.begin(), done_.end(), 0);
    key_[root] = -kNever, at_[root] = meet, tree[root].link = -1;
    reached_.assign(1, root);
    double cost = 0;
    for (int32_t left = n; left > 0; left--) {
      if (reached_.empty()) return kNever;
      size_t best = 0;
      for (size_t k = 1; k < reached_.size(); k++)
        if (key_[reached_[k]] < key_[reached_[best]]) best = k;
      int32_t v = reached_[best];
      reached_[best] = reached_.back(), reached_.pop_back();
      done_[v] = 1;
      if (v != root) cost += kCompact * std::abs(at_[v] - meet) + price[tree[v].link];
      if (cost >= most) return kNever;
      for (int32_t l : gathers ? in[v] : out[v]) {
        int32_t u = gathers ? src[l] : dst[l];
        if (!done_[u]) offer(u, at_[v], l, gathers, tree[u]);
      }
    }
    return cost;
  }

  // Pieces to take out: those that meet about the same moment, or any.
  std::vector<int32_t> chosen(int32_t count) {
    std::vector<std::pair<double, int32_t>> order;
    bool near = chance() < 0.5;
    double moment = until * chance();
    for (int32_t p = 0; p < (int32_t)pairs.size(); p++)
      if (pairs[p].placed) order.push_back({near ? std::abs(pairs[p].meet - moment) * (0.7 + 0.6 * chance()) : chance(), p});
    count = std::min(count, (int32_t)order.size());
    std::partial_sort(order.begin(), order.begin() + count, order.end());
    std::vector<int32_t> found;
    for (int32_t k = 0; k < count; k++) found.push_back(order[k].second);
    return found;
  }
};

// Returns how many pieces did not fit, and of all sends the link, the piece, whether it gathers, and when it starts.
nb::object timetable(int32_t num_ranks, In<int32_t> link_src, In<int32_t> link_dst, In<double> slot_us, In<double> tail_us,
                     double extra_us, int32_t pieces, double until_us, double full_us, int32_t tries, double ruin,
                     int64_t most_insertions, uint64_t seed, In<int32_t> home) {
  if (home.shape(0) > 0 && (int64_t)home.shape(0) != pieces) throw std::invalid_argument("timetable: pieces without a home");
  for (size_t k = 0; k < home.shape(0); k++)
    if (home.data()[k] < 0 || home.data()[k] >= num_ranks) throw std::out_of_range("timetable: no such rank");
  auto links = (int64_t)link_src.shape(0);
  if (num_ranks < 2 || pieces < 1 || tries < 1 || !(until_us > 0) || !(ruin >= 0 && ruin <= 1))
    throw std::invalid_argument("timetable: needs two ranks, a piece, a try and some time");
  if ((int64_t)link_dst.shape(0) != links || (int64_t)slot_us.shape(0) != links || (int64_t)tail_us.shape(0) != links)
    throw std::invalid_argument("timetable: arrays differ in length");
  for (int64_t l = 0; l < links; l++) {
    if (link_src.data()[l] < 0 || link_src.data()[l] >= num_ranks || link_dst.data()[l] < 0 || link_dst.data()[l] >= num_ranks)
      throw std::out_of_range("timetable: no such rank");
    if (!(slot_us.data()[l] > 0)) throw std::invalid_argument("timetable: a slot has no length");
  }
  std::vector<int32_t> link, piece;
  std::vector<uint8_t> gathers;
  std::vector<double> start;
  int64_t missing;
  {
    nb::gil_scoped_release release;
    Timetable table(num_ranks, link_src, link_dst, slot_us.data(), tail_us.data(), extra_us, until_us, full_us, seed);
    if (home.shape(0) > 0) table.home = home.data();
    missing = (int64_t)table.fill(pieces, tries, ruin, most_insertions).size();
    for (int32_t p = 0; p < pieces && !missing; p++)
      for (bool adds : {true, false})
        for (auto& step : adds ? table.pairs[p].gather : table.pairs[p].spread)
          if (step.link >= 0) {
            link.push_back(step.link), piece.push_back(p), gathers.push_back(adds);
            start.push_back(step.slot * slot_us.data()[step.link]);
          }
  }
  return nb::make_tuple(missing, to_numpy(std::move(link)), to_numpy(std::move(piece)), to_numpy(std::move(gathers)),
                        to_numpy(std::move(start)));
}

}  // namespace

void bind_timetable(nb::module_& m) {
  m.def("timetable", &timetable, nb::arg("num_ranks"), nb::arg("link_src"), nb::arg("link_dst"), nb::arg("slot_us"),
        nb::arg("tail_us"), nb::arg("extra_us"), nb::arg("pieces"), nb::arg("until_us"), nb::arg("full_us"), nb::arg("tries"),
        nb::arg("ruin"), nb::arg("most_insertions"), nb::arg("seed"), nb::arg("home"));
}
}  // namespace stretto

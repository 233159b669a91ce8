// SPDX-License-Identifier: Apache-2.0
// An all-reduce as a timetable in which links may be overfull: all pieces are there from the beginning, and move.
//
// Time is cut into a few spans. Each piece has a root, a moment at which the root knows its sum, and a pair of trees around
// it, as in timetable.cpp; but its sends take no slots of their own. They only fill spans of links, whose price rises by e
// for a fraction of what the span holds, beyond it, too. Piece after piece is taken out and put back where it costs least,
// some times, while prices become steeper. So pieces that were put in first learn what those that came later ask for, which
// slots that are given away once do not tell. An all-gather has the second tree only, from the rank whose piece it is.
#include <algorithm>
#include <cmath>
#include <random>
#include <stdexcept>

#include "arrays.h"

namespace stretto {
namespace {

constexpr double kTiny = 1e-9;
constexpr double kNever = 1e300;
constexpr double kGentle = 5.0, kSteep = 20.0;  // how fast the price of a span falls with its free share, at first and at last
constexpr double kFirm = 14.0;                  // the same at first where pieces have places already
constexpr int32_t kPersist = 8;
constexpr double kMost = 50.0;                  // the most that the logarithm of a price rises by
constexpr double kCompact = 0.005;              // what a microsecond of delay counts beside prices where pairs are compared
constexpr double kNear = 3.0;                   // how many spans a piece's moment is moved at most where it is only moved a little

// One rank's part of a tree: the link to (from) its parent, and when it is used. Of the root: link -1.
struct SoftStep {
  int32_t link = -1;
  double start = 0;
};

struct SoftPair {
  int32_t root = -1;
  double meet = 0;  // when the root knows the sum
  std::vector<SoftStep> gather, spread;
};

class SoftTimetable {
 public:
  std::vector<SoftPair> pairs;

  SoftTimetable(int32_t ranks, In<int32_t>& link_src, In<int32_t>& link_dst, const double* slot, const double* tail, double extra,
                double until, double full, int32_t spans, const int32_t* home, int32_t pieces, uint64_t seed)
      : pairs(pieces), n_(ranks), spans_(spans), src_(link_src.data()), dst_(link_dst.data()), slot_(slot), tail_(tail),
        extra_(extra), until_(until), span_us_(until / spans), full_us_(full), home_(home), in_(ranks), out_(ranks),
        before_(ranks), behind_(ranks), at_(ranks), key_(ranks), done_(ranks), draw_(seed) {
    auto links = (int64_t)link_src.shape(0);
    load_.assign(links * spans, 0), price_.assign(links * spans, 0);
    for (int32_t l = 0; l < (int32_t)links; l++) {
      in_[dst_[l]].push_back(l), out_[src_[l]].push_back(l);
      // What leaves after the last moment is too late: the last spans hold less, or nothing.
      for (int32_t b = 0; b < spans; b++)
        holds_.push_back(std::max(std::min(span_us_, until - tail[l] - b * span_us_), kTiny) / slot[l]);
    }
    for (auto& pair : pairs) pair.gather.resize(n_), pair.spread.resize(n_);
    trial_.gather.resize(n_), trial_.spread.resize(n_);
    std::vector<SoftStep> tree(n_);
    for (int32_t r = 0; r < n_; r++) {
      before_[r] = grow(r, until, true, tree, kNever) < kNever ? until - *std::min_element(at_.begin(), at_.end()) : kNever;
      behind_[r] = grow(r, 0.0, false, tree, kNever) < kNever ? *std::max_element(at_.begin(), at_.end()) : kNever;
    }
  }

  // Begin with pieces where another timetable has put them, instead of nowhere.
  void begin(int32_t root, double meet, SoftPair& pair) {
    pair.root = root, pair.meet = meet;
    warm_ = true;
  }

  void count_loads() {
    for (auto& pair : pairs) each(pair, [&](size_t k) { load_[k] += 1; });
  }

  // Move all pieces some times; false where one fits nowhere in the time that there is.
  bool settle(int32_t passes, int32_t tries) {
    double gentle = warm_ ? kFirm : kGentle;
    std::vector<int32_t> turn(pairs.size());
    for (size_t p = 0; p < turn.size(); p++) turn[p] = (int32_t)p;
    for (int32_t k = 0; k < passes; k++) {
      steep_ = gentle + (kSteep - gentle) * k / std::max(1, passes - 1);
      for (size_t j = 0; j < price_.size(); j++) set_price(j);
      std::shuffle(turn.begin(), turn.end(), draw_);
      for (int32_t p : turn)
        if (!move(pairs[p], home_ ? home_[p] : -1, tries)) return false;
    }
    return true;
  }

 private:
  int32_t n_, spans_;
  const int32_t *src_, *dst_;
  const double *slot_, *tail_;
  double extra_, until_, span_us_, full_us_, steep_ = kGentle;
  const int32_t* home_;
  std::vector<std::vector<int32_t>> in_, out_;
  std::vector<double> holds_, load_, price_, before_, behind_, at_, key_;
  std::vector<uint8_t> done_;
  std::vector<int32_t> reached_;
  std::mt19937_64 draw_;
  SoftPair trial_;
  bool warm_ = false;

  double chance() { return (double)(draw_() >> 11) * 0x1p-53; }
  int32_t span(double us) const { return std::clamp((int32_t)(us / span_us_), 0, spans_ - 1); }
  size_t place(const SoftStep& step) const { return (size_t)step.link * spans_ + span(step.start); }
  void set_price(size_t k) { price_[k] = full_us_ * std::exp(std::min(kMost, steep_ * (load_[k] / holds_[k] - 1))); }

  // Calls what is given with the span of each send.
  template <class F>
  void each(const SoftPair& pair, F what) const {
    for (auto* tree : {&pair.gather, &pair.spread})
      for (auto& step : *tree)
        if (step.link >= 0) what(place(step));
  }

  // Take a piece out, and put it in where it costs least: where it was, at another moment nearby, or somewhere else.
  bool move(SoftPair& pair, int32_t home, int32_t tries) {
    double least = kNever, was = pair.meet;
    int32_t old = pair.root;
    if (old >= 0) {
      each(pair, [&](size_t k) { load_[k] -= 1, set_price(k); });
      least = 0;
      each(pair, [&](size_t k) { least += price_[k]; });
    }
    // A piece that has no place yet is tried until it has one, at every root a few times at most.
    for (int32_t k = 0; k < tries || (pair.root < 0 && k < tries + kPersist * n_); k++) {
      bool nearby = old >= 0 && k % 4 == 1;
      // Half of the tries are at roots that other pieces have.
      int32_t other = old >= 0 && k % 2 ? pairs[draw_() % pairs.size()].root : -1;
      trial_.root = home >= 0 ? home : nearby ? old : other >= 0 ? other : (int32_t)(draw_() % n_);
      double from = home >= 0 ? 0.0 : before_[trial_.root], to = until_ - behind_[trial_.root];
      if (to < from) continue;
      trial_.meet = nearby ? std::clamp(was + (2 * chance() - 1) * kNear * span_us_, from, to) : from + (to - from) * chance();
      double cost = home >= 0 ? 0.0 : grow(trial_.root, trial_.meet, true, trial_.gather, least);
      if (cost < least) cost += grow(trial_.root, trial_.meet, false, trial_.spread, least - cost);
      if (cost < least) least = cost, std::swap(pair, trial_);
    }
    if (pair.root < 0) return false;
    each(pair, [&](size_t k) { load_[k] += 1, set_price(k); });
    return true;
  }

  // Let rank v join the tree by a link to (from) one that is in it, in the best span, if that is better than what v has.
  void offer(int32_t v, double by, int32_t l, bool gathers, SoftStep& step) {
    const double* price = &price_[(size_t)l * spans_];
    auto take = [&](double key, double at, double start) {
      if (key >= key_[v]) return;
      if (key_[v] == kNever) reached_.push_back(v);
      key_[v] = key, at_[v] = at, step = {l, start};
    };
    if (gathers) {
      double last = by - extra_ - tail_[l] - slot_[l];
      if (last < 0) return;
      for (int32_t b = span(last); b >= 0; b--) {
        double start = std::min(last, (b + 1) * span_us_ - kTiny);
        if (-start >= key_[v]) break;
        take(-start + price[b], start, start);
      }
    } else {
      for (int32_t b = span(by); b < spans_; b++) {
        double start = std::max(by, b * span_us_), at = start + slot_[l] + tail_[l];
        if (at > until_ + kTiny || at >= key_[v]) break;
        take(at + price[b], at, start);
      }
    }
  }

  // Grow a tree from the root and return what it costs; kNever where it does not reach every rank, or costs more than `most`.
  double grow(int32_t root, double meet, bool gathers, std::vector<SoftStep>& tree, double most) {
    std::fill(key_.begin(), key_.end(), kNever), std::fill(done_.begin(), done_.end(), 0);
    key_[root] = -kNever, at_[root] = meet, tree[root].link = -1;
    reached_.assign(1, root);
    double cost = 0;
    for (int32_t left = n_; left > 0; left--) {
      if (reached_.empty()) return kNever;
      size_t best = 0;
      for (size_t k = 1; k < reached_.size(); k++)
        if (key_[reached_[k]] < key_[reached_[best]]) best = k;
      int32_t v = reached_[best];
      reached_[best] = reached_.back(), reached_.pop_back();
      done_[v] = 1;
      if (v != root) cost += kCompact * std::abs(at_[v] - meet) + price_[place(tree[v])];
      if (cost >= most) return kNever;
      for (int32_t l : gathers ? in_[v] : out_[v]) {
        int32_t u = gathers ? src_[l] : dst_[l];
        if (!done_[u]) offer(u, at_[v], l, gathers, tree[u]);
      }
    }
    return cost;
  }
};

// Returns whether all pieces fit, of all sends the link, the piece, whether it gathers, and about when it starts, and of each
// piece the root. Where `first_root` is given, pieces begin at these roots with these sends, and are moved from there.
nb::object soft_timetable(int32_t num_ranks, In<int32_t> link_src, In<int32_t> link_dst, In<double> slot_us, In<double> tail_us,
                          double extra_us, int32_t pieces, double until_us, double full_us, int32_t spans, int32_t passes,
                          int32_t tries, uint64_t seed, In<int32_t> home, In<int32_t> first_root, In<double> first_meet,
                          In<int32_t> first_link, In<int32_t> first_piece, In<uint8_t> first_gathers, In<double> first_start) {
  if (home.shape(0) > 0 && (int64_t)home.shape(0) != pieces) throw std::invalid_argument("soft_timetable: pieces without a home");
  for (size_t k = 0; k < home.shape(0); k++)
    if (home.data()[k] < 0 || home.data()[k] >= num_ranks) throw std::out_of_range("soft_timetable: no such rank");
  auto links = (int64_t)link_src.shape(0);
  if (num_ranks < 2 || pieces < 1 || tries < 1 || passes < 1 || spans < 1 || spans > 1 << 12 || !(until_us > 0))
    throw std::invalid_argument("soft_timetable: needs two ranks, a piece, a try, a pass, a span and some time");
  if ((int64_t)link_dst.shape(0) != links || (int64_t)slot_us.shape(0) != links || (int64_t)tail_us.shape(0) != links)
    throw std::invalid_argument("soft_timetable: arrays differ in length");
  for (int64_t l = 0; l < links; l++) {
    if (link_src.data()[l] < 0 || link_src.data()[l] >= num_ranks || link_dst.data()[l] < 0 || link_dst.data()[l] >= num_ranks)
      throw std::out_of_range("soft_timetable: no such rank");
    if (!(slot_us.data()[l] > 0)) throw std::invalid_argument("soft_timetable: a slot has no length");
  }
  size_t known = first_link.shape(0);
  if ((first_root.shape(0) > 0 && (int64_t)first_root.shape(0) != pieces) || first_meet.shape(0) != first_root.shape(0) ||
      first_piece.shape(0) != known || first_gathers.shape(0) != known || first_start.shape(0) != known || (known > 0 && !first_root.shape(0)))
    throw std::invalid_argument("soft_timetable: arrays of the first places differ in length");
  for (size_t k = 0; k < first_root.shape(0); k++)
    if (first_root.data()[k] < 0 || first_root.data()[k] >= num_ranks) throw std::out_of_range("soft_timetable: no such rank");
  for (size_t k = 0; k < known; k++)
    if (first_link.data()[k] < 0 || first_link.data()[k] >= links || first_piece.data()[k] < 0 || first_piece.data()[k] >= pieces)
      throw std::out_of_range("soft_timetable: no such link or piece");
  std::vector<int32_t> link, piece, root;
  std::vector<uint8_t> gathers;
  std::vector<double> start;
  bool fits;
  {
    nb::gil_scoped_release release;
    const int32_t* homes = home.shape(0) > 0 ? home.data() : nullptr;
    SoftTimetable table(num_ranks, link_src, link_dst, slot_us.data(), tail_us.data(), extra_us, until_us, full_us, spans, homes, pieces, seed);
    for (size_t p = 0; p < first_root.shape(0); p++) table.begin(first_root.data()[p], first_meet.data()[p], table.pairs[p]);
    for (size_t k = 0; k < known; k++) {
      int32_t l = first_link.data()[k];
      auto& pair = table.pairs[first_piece.data()[k]];
      if (first_gathers.data()[k])
        pair.gather[link_src.data()[l]] = {l, first_start.data()[k]};
      else
        pair.spread[link_dst.data()[l]] = {l, first_start.data()[k]};
    }
    if (known > 0) table.count_loads();
    fits = table.settle(passes, tries);
    for (auto& pair : table.pairs) root.push_back(pair.root);
    for (int32_t p = 0; p < pieces && fits; p++)
      for (bool adds : {true, false})
        for (auto& step : adds ? table.pairs[p].gather : table.pairs[p].spread)
          if (step.link >= 0) link.push_back(step.link), piece.push_back(p), gathers.push_back(adds), start.push_back(step.start);
  }
  return nb::make_tuple(fits, to_numpy(std::move(link)), to_numpy(std::move(piece)), to_numpy(std::move(gathers)),
                        to_numpy(std::move(start)), to_numpy(std::move(root)));
}

}  // namespace

void bind_soft_timetable(nb::module_& m) {
  m.def("soft_timetable", &soft_timetable, nb::arg("num_ranks"), nb::arg("link_src"), nb::arg("link_dst"), nb::arg("slot_us"),
        nb::arg("tail_us"), nb::arg("extra_us"), nb::arg("pieces"), nb::arg("until_us"), nb::arg("full_us"), nb::arg("spans"),
        nb::arg("passes"), nb::arg("tries"), nb::arg("seed"), nb::arg("home"), nb::arg("first_root"), nb::arg("first_meet"), nb::arg("first_link"),
        nb::arg("first_piece"), nb::arg("first_gathers"), nb::arg("first_start"));
}
}  // namespace stretto

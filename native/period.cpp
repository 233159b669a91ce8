// SPDX-License-Identifier: Apache-2.0
// The steady state of a periodic order: the largest ratio of time to lag over all circles of waiting.
#include <algorithm>

#include "schedule.h"

namespace stretto::sched {
namespace {
constexpr double kSame = 1e-11;  // of the period: times nearer than this are one moment
}

// Follows parents from every node, or from those given; the nodes of a circle, each followed by its parent, else nothing.
bool circle_of_parents(int32_t n, const std::vector<int32_t>& parent, std::vector<int32_t>& mark,
                       std::vector<int32_t>& circle, const std::vector<int32_t>* nodes) {
  mark.assign(n, -1);
  const int32_t count = nodes ? (int32_t)nodes->size() : n;
  for (int32_t from = 0; from < count; from++) {
    int32_t v = nodes ? (*nodes)[from] : from;
    while (v >= 0 && mark[v] < 0) mark[v] = from, v = parent[v];
    if (v < 0 || mark[v] != from) continue;
    circle.clear();
    for (int32_t u = v; circle.empty() || u != v; u = parent[u]) circle.push_back(u);
    return true;
  }
  return false;
}

// Each task waits until the one before it has given back each of its resources; the first of a window waits for the last
// of the one before.
void Evaluator::order_edges() {
  more_.clear(), more_begin_.assign(n_, 0), more_end_.assign(n_, 0);
  more_to_.clear(), more_next_.clear(), more_first_.assign(n_, -1), behind_.clear();
  std::fill(load_.begin(), load_.end(), 0.0);
  for (int32_t v : sequence)
    each_hold(v, [&](int32_t r, double us) { last_[r] = v, last_us_[r] = us, last_wrap_[r] = 1, load_[r] += us; });
  for (int32_t v : sequence) {
    size_t begin = more_.size();
    each_hold(v, [&](int32_t r, double us) {
      Edge edge{last_[r], shift[v] - shift[last_[r]] + last_wrap_[r], last_us_[r]};
      last_[r] = v, last_us_[r] = us, last_wrap_[r] = 0;
      for (size_t e = begin; e < more_.size(); e++)
        if (more_[e].node == edge.node && more_[e].lag <= edge.lag && more_[e].us >= edge.us) return;
      more_to_.push_back(v), more_next_.push_back(more_first_[edge.node]);
      more_first_[edge.node] = (int32_t)more_.size();
      more_.push_back(edge);
      if (edge.lag < 0) behind_.push_back(v);
    });
    more_begin_[v] = (int64_t)begin, more_end_[v] = (int64_t)more_.size();
  }
}

// What waits for v is looked at again: in this pass if its turn is still to come, else in the next.
void Evaluator::disturb(int32_t v) {
  const int32_t at = turn_[v];
  auto mark = [&](int32_t w) {
    int32_t k = turn_[w];
    (k > at ? dirty_ : later_)[k / 64] |= 1ull << (k % 64);
  };
  for (int64_t e = out_ptr_[v]; e < out_ptr_[v + 1]; e++) mark(out_[e].node);
  for (int32_t e = more_first_[v]; e >= 0; e = more_next_[e]) mark(more_to_[e]);
}

// Starts of v no earlier than its waits allow; whether that changed it.
bool Evaluator::delay(int32_t v, double same) {
  bool changed = false;
  double best = time[v] + same;
  auto relax = [&](const Edge& e) {
    double to = time[e.node] + e.us - value * e.lag;
    if (to > best) {
      best = time[v] = to, parent_[v] = e.node, parent_lag_[v] = e.lag, parent_us_[v] = e.us, changed = true;
    }
  };
  for (int64_t e = in_ptr_[v]; e < in_ptr_[v + 1]; e++) relax(in_[e]);
  for (int64_t e = more_begin_[v]; e < more_end_[v]; e++) relax(more_[e]);
  return changed;
}

// Delays all nodes in the order of the walk until none changes (false), or until some wait for each other (true): then
// `critical` is that circle.
bool Evaluator::wait_in_circle() {
  const double same = kSame * value;
  for (int32_t pass = 0;; pass++) {
    bool changed = false;
    for (int32_t v : walk_) changed |= delay(v, same);
    if (!changed) return false;
    if (pass > 0 && circle_of_parents(n_, parent_, mark_, critical)) return true;
  }
}

// The same for the nodes that are to be looked at, and those that wait for one that changed.
bool Evaluator::wait_in_circle_near() {
  const double same = kSame * value;
  for (int32_t pass = 0;; pass++) {
    moved_.clear();
    for (size_t word = 0; word < dirty_.size(); word++)
      while (dirty_[word]) {
        int32_t v = walk_[word * 64 + std::countr_zero(dirty_[word])];
        dirty_[word] &= dirty_[word] - 1;
        if (delay(v, same)) disturb(v), moved_.push_back(v);
      }
    if (moved_.empty()) return false;
    dirty_.swap(later_);
    // A circle that has just closed has a node that has just changed.
    if (circle_of_parents(n_, parent_, mark_, critical, &moved_)) return true;
  }
}

// The period becomes the ratio of the circle in `critical`.
Outcome Evaluator::raise_to_circle(double limit) {
  double length = 0;
  int64_t lag = 0;
  critical_lag.clear();
  for (int32_t v : critical) length += parent_us_[v], lag += parent_lag_[v], critical_lag.push_back(parent_lag_[v]);
  if (lag <= 0) return Outcome::deadlock;
  // Rounding may find the circle again that has just set the period.
  value = std::max(length / (double)lag, value * (1 + 1e-13));
  return value > limit ? Outcome::above_limit : Outcome::found;
}

// Raises the period to the ratio of a circle that does not fit, until all fit; from the earliest possible times.
Outcome Evaluator::raise(double limit) {
  parent_.resize(n_), parent_lag_.resize(n_), parent_us_.resize(n_);
  while (true) {
    std::fill(parent_.begin(), parent_.end(), -1);
    for (int32_t v = 0; v < n_; v++)
      time[v] = local[v] == kJoin ? -std::numeric_limits<double>::infinity() : task_[v] >= 0 ? -shift[v] * value : 0.0;
    if (!wait_in_circle()) return Outcome::found;
    Outcome outcome = raise_to_circle(limit);
    if (outcome != Outcome::found) return outcome;
  }
}

// The same from the times that nodes have. A longer period relaxes all waits but those for a later iteration, so that the
// times that were found for the shorter one are kept.
Outcome Evaluator::raise_near(double limit) {
  parent_.resize(n_), parent_lag_.resize(n_), parent_us_.resize(n_), turn_.resize(n_);
  for (int32_t k = 0; k < n_; k++) turn_[walk_[k]] = k;
  dirty_.assign((size_t)n_ / 64 + 1, ~0ull), later_.assign(dirty_.size(), 0);
  dirty_.back() = (1ull << (n_ % 64)) - 1;
  while (true) {
    std::fill(parent_.begin(), parent_.end(), -1);
    if (!wait_in_circle_near()) return Outcome::found;
    Outcome outcome = raise_to_circle(limit);
    if (outcome != Outcome::found) return outcome;
    for (int32_t v : behind_) dirty_[turn_[v] / 64] |= 1ull << (turn_[v] % 64);
  }
}

// Of the circles of the tightest waits at these times, the one with the largest ratio: the period is at least that.
void Evaluator::lower_to_circle(double least) {
  for (int32_t v = 0; v < n_; v++) {
    double tightest = -std::numeric_limits<double>::infinity();
    parent_[v] = -1;
    auto look = [&](const Edge& e) {
      double to = time[e.node] + e.us - value * e.lag;
      if (to > tightest) tightest = to, parent_[v] = e.node, parent_lag_[v] = e.lag, parent_us_[v] = e.us;
    };
    for (int64_t e = in_ptr_[v]; e < in_ptr_[v + 1]; e++) look(in_[e]);
    for (int64_t e = more_begin_[v]; e < more_end_[v]; e++) look(more_[e]);
  }
  value = least;
  mark_.assign(n_, -1);
  for (int32_t from = 0; from < n_; from++) {
    int32_t v = from;
    while (v >= 0 && mark_[v] < 0) mark_[v] = from, v = parent_[v];
    if (v < 0 || mark_[v] != from) continue;
    double length = 0;
    int64_t lag = 0;
    int32_t u = v;
    do length += parent_us_[u], lag += parent_lag_[u], u = parent_[u];
    while (u != v);
    if (lag <= 0 || !(length / (double)lag > value)) continue;
    value = length / (double)lag, critical.clear(), critical_lag.clear();
    do critical.push_back(u), critical_lag.push_back(parent_lag_[u]), u = parent_[u];
    while (u != v);
  }
}

// The period of an order that differs little from one whose times and period are known: most orders that are too slow
// show it there. If all fits, the period may be shorter: it is looked for from the circle of the tightest waits.
Outcome Evaluator::settle_near(double limit, const Nearby& nearby) {
  const double least = value;
  for (int32_t v = 0; v < n_; v++)
    time[v] = local[v] == kJoin ? -std::numeric_limits<double>::infinity() : (*nearby.times)[v];
  const bool known = !critical_lag.empty();
  if (!known) value = std::max(value, nearby.period);
  Outcome outcome = raise_near(limit);
  if (outcome != Outcome::found || !critical_lag.empty() || value <= least) return outcome;
  lower_to_circle(least);
  return raise_near(limit);
}

// The earliest times for the period that was found.
void Evaluator::make_earliest() {
  std::vector<int32_t> circle = critical, lags = critical_lag;
  critical_lag.clear();
  raise(std::numeric_limits<double>::infinity());
  if (critical_lag.empty()) critical = std::move(circle), critical_lag = std::move(lags);
}

// If the circle is one of waits of this order, the period is at least its ratio.
void Evaluator::begin_at(const std::vector<PlaceOfNode>& circle, const std::vector<int32_t>& lags) {
  const size_t count = circle.size();
  std::vector<int32_t>& nodes = merged_;
  nodes.clear();
  for (const PlaceOfNode& at : circle) {
    int32_t v = at.local == kJoin ? end_[at.op] : first_[at.op] + std::max(at.local, 0);
    if (v > end_[at.op] || local[v] != at.local) return;
    nodes.push_back(v);
  }
  double length = 0;
  int64_t lag = 0;
  for (size_t k = 0; k < count; k++) {
    int32_t v = nodes[k], u = nodes[(k + 1) % count];
    double longest = -1;
    auto look = [&](const Edge& e) {
      if (e.node == u && e.lag == lags[k]) longest = std::max(longest, e.us);
    };
    for (int64_t e = in_ptr_[v]; e < in_ptr_[v + 1]; e++) look(in_[e]);
    for (int64_t e = more_begin_[v]; e < more_end_[v]; e++) look(more_[e]);
    if (longest < 0) return;
    length += longest, lag += lags[k];
  }
  if (lag <= 0 || !(length / (double)lag > value)) return;
  value = length / (double)lag, critical = nodes, critical_lag = lags;
}

// Raises the period from the busiest resource's load to the ratio of a circle that does not fit, until all fit; then
// `time` holds starts that repeat with it, the earliest unless it began near others.
Outcome Evaluator::period(double limit, const Nearby& nearby) {
  order_edges();
  value = p_.stream_load;
  critical.clear(), critical_lag.clear();
  int32_t full = -1;
  for (size_t r = 0; r < load_.size(); r++)
    if (load_[r] > value) value = load_[r], full = (int32_t)r;
  if (value > limit) return Outcome::above_limit;
  if (full >= 0)
    for (int32_t v : sequence)
      if (mask(v)[full / 64] >> (full % 64) & 1) critical.push_back(v);
  if (nearby.circle != nullptr) begin_at(*nearby.circle, *nearby.lags);
  else if (n_ >= kManyNodes && !circle_lag_.empty()) begin_at(circle_, circle_lag_);
  if (value > limit) return Outcome::above_limit;
  Outcome outcome = nearby.times ? settle_near(limit, nearby) : raise(limit);
  if (outcome != Outcome::found) return outcome;
  if (nearby.times && nearby.earliest) make_earliest();
  double from = time[first_[p_.anchor]];
  for (int32_t v = 0; v < n_; v++) time[v] -= from;
  if (n_ >= kManyNodes && !critical_lag.empty()) {
    circle_.clear(), circle_lag_ = critical_lag;
    for (int32_t v : critical) circle_.push_back(place_of(v));
  }
  return Outcome::found;
}

}  // namespace stretto::sched

// SPDX-License-Identifier: Apache-2.0
// Dynamic list scheduling, and the periodic orders taken from it.
#include "schedule.h"

#include <algorithm>
#include <cmath>

namespace stretto::sched {
namespace {
constexpr double kCut = 1e-9;    // of the period: a start this near to the next window belongs to it
constexpr double kFar = 16;      // periods: more than any op lags behind another in a steady state
constexpr int32_t kFew = 256;    // nodes that are sorted by moving them one by one

// Nodes so that each follows what it waits for in its own or a later iteration, as far as that is possible.
std::vector<int32_t> by_waits(int32_t n, const std::vector<int64_t>& in_ptr, const std::vector<Edge>& in) {
  std::vector<int64_t> out_ptr(n + 1, 0);
  std::vector<int32_t> left(n, 0), walk;
  for (int32_t v = 0; v < n; v++)
    for (int64_t e = in_ptr[v]; e < in_ptr[v + 1]; e++)
      if (in[e].lag <= 0) out_ptr[in[e].node + 1]++, left[v]++;
  for (int32_t v = 0; v < n; v++) out_ptr[v + 1] += out_ptr[v];
  std::vector<int32_t> out(out_ptr[n]);
  std::vector<int64_t> fill(out_ptr.begin(), out_ptr.end() - 1);
  for (int32_t v = 0; v < n; v++)
    for (int64_t e = in_ptr[v]; e < in_ptr[v + 1]; e++)
      if (in[e].lag <= 0) out[fill[in[e].node]++] = v;
  for (int32_t v = 0; v < n; v++)
    if (left[v] == 0) walk.push_back(v);
  for (size_t k = 0; k < walk.size(); k++)
    for (int64_t e = out_ptr[walk[k]]; e < out_ptr[walk[k] + 1]; e++)
      if (--left[out[e]] == 0) walk.push_back(out[e]);
  for (int32_t v = 0; v < n; v++)
    if (left[v] > 0) walk.push_back(v);
  return walk;
}

std::vector<int32_t> search_deadlock(int32_t n, const std::vector<int64_t>& in_ptr, const std::vector<Edge>& in,
                                     const std::vector<int32_t>* walk, std::vector<int64_t>* height) {
  // With span > n, a circle sums to less than zero exactly when its lag does not exceed zero.
  const int64_t span = n + 1;
  std::vector<int64_t> distance(n, 0);
  std::vector<int32_t> parent(n, -1), mark, circle;
  for (bool changed = true; changed;) {
    changed = false;
    for (int32_t k = 0; k < n; k++) {
      int32_t v = walk ? (*walk)[k] : k;
      for (int64_t e = in_ptr[v]; e < in_ptr[v + 1]; e++) {
        int64_t to = distance[in[e].node] + in[e].lag * span - 1;
        if (to < distance[v]) distance[v] = to, parent[v] = in[e].node, changed = true;
      }
    }
    if (changed && circle_of_parents(n, parent, mark, circle)) return circle;
  }
  if (height) *height = std::move(distance);
  return {};
}
}  // namespace

std::vector<int32_t> find_deadlock(int32_t n, const std::vector<int64_t>& in_ptr, const std::vector<Edge>& in,
                                   std::vector<int64_t>* height) {
  if (n < kManyNodes) return search_deadlock(n, in_ptr, in, nullptr, height);
  // In the order of their numbers long chains of waiting would take as many passes as they have turns.
  std::vector<int32_t> walk = by_waits(n, in_ptr, in);
  return search_deadlock(n, in_ptr, in, &walk, height);
}

Evaluator::Evaluator(const Problem& problem) : p_(problem) {
  first_.resize(p_.num_ops), end_.resize(p_.num_ops);
  busy_.resize(p_.num_words);
  last_.resize((size_t)p_.num_words * 64), last_wrap_.resize(last_.size()), load_.resize(last_.size());
  last_us_.resize(last_.size());
}

void Evaluator::choose(const int32_t* choice, bool serial) {
  serial_ = serial;
  if (!choice_.empty() && std::equal(choice_.begin(), choice_.end(), choice)) return;
  choice_.assign(choice, choice + p_.num_ops);
  const bool carries = n_ > kFew && (int32_t)walk_.size() == n_;
  if (carries) old_op_ = op, old_first_ = first_, old_end_ = end_;
  build();
  if (carries) carry_walk();
}

// Nodes of the choice before become those of this one, so that the walk is sorted but for the ops that changed.
void Evaluator::carry_walk() {
  merged_.clear();
  for (int32_t v : walk_) {
    int32_t o = old_op_[v], to = first_[o] + v - old_first_[o];
    if (old_end_[o] - old_first_[o] == end_[o] - first_[o]) merged_.push_back(to);
    else if (to == first_[o])
      for (; to <= end_[o]; to++) merged_.push_back(to);
  }
  walk_.swap(merged_);
}

// Nodes are numbered so that a wait inside an iteration is always for a smaller number.
void Evaluator::build() {
  op.clear(), local.clear(), us.clear(), task_.clear();
  auto add = [&](int32_t o, int32_t l, double duration, int64_t task) {
    op.push_back(o), local.push_back(l), us.push_back(duration), task_.push_back(task);
  };
  for (int32_t o : p_.topological) {
    first_[o] = (int32_t)op.size();
    if (!p_.comm[o]) {
      add(o, kCompute, p_.duration[o], -1);
    } else {
      int64_t base = p_.first_task(o, choice_[o]);
      int32_t count = p_.tasks(o, choice_[o]), sinks = 0;
      for (int32_t t = 0; t < count; t++) add(o, t, p_.task_us[base + t], base + t), sinks += p_.sink[base + t];
      // The last task is always a sink; several of them meet in a node of no duration.
      if (sinks > 1) add(o, kJoin, 0, -1);
    }
    end_[o] = (int32_t)op.size() - 1;
  }
  n_ = (int32_t)op.size();
  in_.clear(), in_ptr_.assign(1, 0);
  for (int32_t v = 0; v < n_; v++) {
    int32_t o = op[v];
    int64_t task = task_[v];
    if (local[v] == kJoin) {
      for (int32_t u = first_[o]; u < v; u++)
        if (p_.sink[task_[u]]) in_.push_back({u, 0, us[u]});
    } else if (task < 0 || p_.inner_ptr[task] == p_.inner_ptr[task + 1]) {
      for (int64_t e = p_.need_ptr[o]; e < p_.need_ptr[o + 1]; e++) {
        int32_t u = end_[p_.need[e].node];
        in_.push_back({u, p_.need[e].lag, us[u]});
      }
    } else {
      for (int64_t e = p_.inner_ptr[task]; e < p_.inner_ptr[task + 1]; e++) {
        int32_t u = first_[o] + p_.inner[e];
        in_.push_back({u, 0, us[u]});
      }
    }
    in_ptr_.push_back((int64_t)in_.size());
  }
  out_ptr_.assign(n_ + 1, 0), out_.resize(in_.size()), fill_.resize(n_);
  for (const Edge& e : in_) out_ptr_[e.node + 1]++;
  for (int32_t v = 0; v < n_; v++) out_ptr_[v + 1] += out_ptr_[v], fill_[v] = (int32_t)out_ptr_[v];
  for (int32_t v = 0; v < n_; v++)
    for (int64_t e = in_ptr_[v]; e < in_ptr_[v + 1]; e++) out_[fill_[in_[e].node]++] = {v, in_[e].lag, 0};
  shift.resize(n_), time.resize(n_), key_.resize(n_), phase_.resize(n_);
}

void Evaluator::list(int32_t iterations, Discipline discipline, const double* key_of_node, double key_per_iteration) {
  const int32_t total = iterations * n_, words = p_.num_words;
  left_.resize(total), start_.resize(total);
  for (int32_t v = 0; v < n_; v++) {
    for (int32_t i = 0; i < iterations; i++) left_[i * n_ + v] = (int32_t)(in_ptr_[v + 1] - in_ptr_[v]);
    for (int64_t e = in_ptr_[v]; e < in_ptr_[v + 1]; e++)
      for (int32_t i = 0; i < std::min(in_[e].lag, iterations); i++) left_[i * n_ + v]--;
  }
  if (discipline == Discipline::critical_path) {
    tail_.resize(total);
    for (int32_t i = iterations - 1; i >= 0; i--)
      for (int32_t v = n_ - 1; v >= 0; v--) {
        double longest = 0;
        for (int64_t e = out_ptr_[v]; e < out_ptr_[v + 1]; e++)
          if (i + out_[e].lag < iterations) longest = std::max(longest, tail_[(i + out_[e].lag) * n_ + out_[e].node]);
        tail_[i * n_ + v] = longest + us[v];
      }
  }
  const bool in_line = discipline == Discipline::fifo;
  if (in_line) sort_lines();
  std::fill(busy_.begin(), busy_.end(), 0);
  ready_.clear(), events_.clear(), stack_.clear();
  double now = 0;
  bool look = false;
  auto advance = [&](int32_t v) {
    int32_t line = p_.line[op[v]];
    head_[line] = (head_[line] + 1) % (line_ptr_[line + 1] - line_ptr_[line]);
  };
  auto release = [&](int32_t at, int32_t v, int32_t i) {
    if (task_[v] < 0) {
      start_[at] = now;
      if (local[v] == kJoin) {
        stack_.push_back(at);
      } else {
        events_.push_back({now + us[v], at, v});
        std::push_heap(events_.begin(), events_.end());
      }
      return;
    }
    double key = 0;
    switch (discipline) {
      case Discipline::critical_path: key = -tail_[at]; break;
      case Discipline::lifo: key = -((double)i * n_ + first_[op[v]]); break;
      case Discipline::priority: key = key_of_node[v] + i * key_per_iteration; break;
      case Discipline::fifo: key = now; break;
    }
    Ready entry{key, mask(v)[0], at, v};
    ready_.insert(std::upper_bound(ready_.begin(), ready_.end(), entry), entry);
    look = true;
  };
  auto complete = [&](int32_t at) {
    stack_.push_back(at);
    while (!stack_.empty()) {
      int32_t done = stack_.back(), v = done % n_, i = done / n_;
      stack_.pop_back();
      for (int64_t e = out_ptr_[v]; e < out_ptr_[v + 1]; e++)
        if (i + out_[e].lag < iterations) {
          int32_t next = (i + out_[e].lag) * n_ + out_[e].node;
          if (--left_[next] == 0) release(next, out_[e].node, i + out_[e].lag);
        }
    }
  };
  // What waits for nothing; a join always waits for its tasks.
  for (int32_t at = 0; at < total; at++)
    if (left_[at] == 0) left_[at] = -1, release(at, at % n_, at / n_);
  while (true) {
    while (!events_.empty() && events_.front().at == now) {
      int32_t at = events_.front().what, v = events_.front().node;
      std::pop_heap(events_.begin(), events_.end());
      events_.pop_back();
      if (at < 0) {
        // A task gives back a shared link, and goes on.
        int32_t bit = p_.part[-at - 1].bit;
        busy_[bit / 64] &= ~(1ull << (bit % 64));
        look = true;
        continue;
      }
      if (task_[v] >= 0) {
        const uint64_t* held = whole(v);
        for (int32_t w = 0; w < words; w++) busy_[w] &= ~held[w];
        look = true;
      }
      complete(at);
    }
    while (look) {
      look = false;
      size_t kept = 0;
      for (const Ready& entry : ready_) {
        uint64_t clash = entry.wants & busy_[0];
        // A communicator starts its tasks one after the other; when one has started, the next may be ready already.
        if (in_line && !clash) clash = place_in_line_[entry.node] != head_[p_.line[op[entry.node]]];
        const uint64_t* wanted = mask(entry.node);
        for (int32_t w = 1; w < words && !clash; w++) clash = wanted[w] & busy_[w];
        if (clash) {
          ready_[kept++] = entry;
          continue;
        }
        for (int32_t w = 0; w < words; w++) busy_[w] |= wanted[w];
        if (in_line) advance(entry.node), look = true;
        start_[entry.at] = now;
        events_.push_back({now + us[entry.node], entry.at, entry.node});
        std::push_heap(events_.begin(), events_.end());
        int64_t task = task_[entry.node];
        for (int64_t k = p_.part_ptr[task]; k < p_.part_ptr[task + 1]; k++) {
          events_.push_back({now + p_.part[k].us, -(int32_t)k - 1, entry.node});
          std::push_heap(events_.begin(), events_.end());
        }
      }
      ready_.resize(kept);
    }
    if (events_.empty()) break;
    now = events_.front().at;
  }
}

double Evaluator::wrap(double key, double period, int32_t& ahead) const {
  double window = std::floor(key / period + kCut);
  ahead = -(int32_t)std::clamp(window, -1e6, 1e6);
  return std::max(0.0, key + ahead * period);
}

void Evaluator::extract(int32_t iterations, bool shifted) {
  int32_t middle = std::min(iterations / 2, std::max(iterations - 2, 0)), anchor = first_[p_.anchor];
  const double* start = &start_[(size_t)middle * n_];
  double from = start[anchor], period = 0;
  if (middle + 1 < iterations) period = start_[(size_t)(middle + 1) * n_ + anchor] - from;
  for (int32_t v = 0; v < n_; v++) key_[v] = start[v] - from;
  // Where nothing holds the anchor back it runs ahead, and its pace is not that of the rest.
  bool ahead = false;
  for (int32_t v = 0; v < n_; v++) ahead |= key_[v] > kFar * period;
  if (ahead && middle + 1 < iterations)
    for (int32_t v = 0; v < n_; v++) period = std::max(period, start_[(size_t)(middle + 1) * n_ + v] - start[v]);
  if (shifted && period > 0) {
    // What nothing holds back would run ever further ahead; one iteration is as far as a plan lets an op go.
    for (int32_t v = 0; v < n_; v++)
      if (local[v] == 0) {
        int32_t end = v;
        double early = 0;
        for (; end < n_ && op[end] == op[v] && task_[end] >= 0; end++)
          early = std::max(early, -std::floor(key_[end] / period + kCut) - 1);
        for (int32_t u = v; u < end; u++) key_[u] += early * period;
      }
    return order_by(key_, period);
  }
  sort_walk(key_);
  std::fill(shift.begin(), shift.end(), 0);
  sequence.clear();
  for (int32_t v : walk_)
    if (task_[v] >= 0) sequence.push_back(v);
}

void Evaluator::order_by(const std::vector<double>& key, double period) {
  for (int32_t v = 0; v < n_; v++) {
    if (task_[v] >= 0) phase_[v] = wrap(key[v], period, shift[v]);
    else shift[v] = 0;
  }
  sort_walk(key);
  // By key, windows follow each other, and inside each the phases rise: merging them sorts by phase.
  sequence.clear(), run_.clear();
  auto before = [&](int32_t a, int32_t b) { return phase_[a] < phase_[b]; };
  auto add_run = [&] {
    merged_.resize(sequence.size() + run_.size());
    std::merge(sequence.begin(), sequence.end(), run_.begin(), run_.end(), merged_.begin(), before);
    sequence.swap(merged_), run_.clear();
  };
  for (int32_t v : walk_) {
    if (task_[v] < 0) continue;
    if (!run_.empty() && shift[run_.back()] != shift[v]) add_run();
    run_.push_back(v);
  }
  add_run();
}

// Nodes by key. From one step of a search to the next little changes, so that few have to move.
void Evaluator::sort_walk(const std::vector<double>& key) {
  auto before = [&](int32_t a, int32_t b) { return key[a] != key[b] ? key[a] < key[b] : a < b; };
  if ((int32_t)walk_.size() != n_) {
    walk_.resize(n_);
    for (int32_t v = 0; v < n_; v++) walk_[v] = v;
  }
  if (n_ > kFew) {
    // Of two neighbors in the wrong order either may be the one that moved: both are taken out, sorted and put back.
    moved_.clear();
    int32_t kept = 0, k = 0;
    for (; k < n_ && (int32_t)moved_.size() <= n_ / 8; k++) {
      int32_t v = walk_[k];
      if (kept > 0 && before(v, walk_[kept - 1])) moved_.push_back(walk_[--kept]), moved_.push_back(v);
      else walk_[kept++] = v;
    }
    if (k < n_) {
      std::copy(moved_.begin(), moved_.end(), walk_.begin() + kept);
      return std::sort(walk_.begin(), walk_.end(), before);
    }
    std::sort(moved_.begin(), moved_.end(), before);
    merged_.resize(n_);
    std::merge(walk_.begin(), walk_.begin() + kept, moved_.begin(), moved_.end(), merged_.begin(), before);
    return walk_.swap(merged_);
  }
  for (int32_t k = 1; k < n_; k++) {
    int32_t v = walk_[k], at = k;
    for (; at > 0 && before(v, walk_[at - 1]); at--) walk_[at] = walk_[at - 1];
    walk_[at] = v;
  }
}

void Evaluator::program_order() {
  walk_.resize(n_), sequence.clear();
  for (int32_t v = 0; v < n_; v++) {
    walk_[v] = v, shift[v] = 0;
    if (task_[v] >= 0) sequence.push_back(v);
  }
}

// Per communicator its tasks in the order of submission.
void Evaluator::sort_lines() {
  line_ptr_.assign(p_.num_lines + 1, 0), head_.assign(p_.num_lines, 0), place_in_line_.resize(n_);
  for (int32_t v = 0; v < n_; v++)
    if (task_[v] >= 0) place_in_line_[v] = (int32_t)line_ptr_[p_.line[op[v]] + 1]++;
  for (int32_t line = 0; line < p_.num_lines; line++) line_ptr_[line + 1] += line_ptr_[line];
}

// Whether the periodic order keeps every communicator's.
bool Evaluator::lines_keep_order() {
  position_.resize(n_), line_nodes_.resize(line_ptr_.back());
  for (size_t k = 0; k < sequence.size(); k++) {
    int32_t v = sequence[k];
    position_[v] = (int32_t)k, line_nodes_[line_ptr_[p_.line[op[v]]] + place_in_line_[v]] = v;
  }
  for (int32_t line = 0; line < p_.num_lines; line++)
    for (int64_t k = line_ptr_[line]; k < line_ptr_[line + 1]; k++) {
      bool last = k + 1 == line_ptr_[line + 1];
      int32_t u = line_nodes_[k], v = line_nodes_[last ? line_ptr_[line] : k + 1];
      int32_t windows = shift[u] - shift[v] + last;
      if (u != v && (windows < 0 || (windows == 0 && position_[u] > position_[v]))) return false;
    }
  return true;
}

// First in, first out, for every communicator by itself; where there is only one, that is the program's order.
double Evaluator::fifo(int32_t iterations) {
  if (p_.num_lines <= 1) {
    program_order();
    period();
    return value;
  }
  list(iterations, Discipline::fifo, nullptr, 0);
  extract(iterations, true);
  if (!lines_keep_order() || period() == Outcome::deadlock) {
    extract(iterations, false);
    period();
  }
  return value;
}

void Evaluator::walk_by_waits() {
  if (n_ < kManyNodes) return;
  order_edges();
  std::vector<int64_t> ptr{0};
  std::vector<Edge> all;
  for (int32_t v = 0; v < n_; v++) {
    all.insert(all.end(), in_.begin() + in_ptr_[v], in_.begin() + in_ptr_[v + 1]);
    all.insert(all.end(), more_.begin() + more_begin_[v], more_.begin() + more_end_[v]);
    ptr.push_back((int64_t)all.size());
  }
  walk_ = by_waits(n_, ptr, all);
}

double Evaluator::evaluate(int32_t iterations, Discipline discipline, const double* key_of_node,
                           double key_per_iteration) {
  list(iterations, discipline, key_of_node, key_per_iteration);
  extract(iterations, true);
  if (period() == Outcome::deadlock) {
    extract(iterations, false);
    period();
  }
  return value;
}

std::vector<int32_t> Evaluator::deadlock(std::vector<int64_t>* height) {
  order_edges();
  std::vector<int64_t> ptr{0};
  std::vector<Edge> all;
  for (int32_t v = 0; v < n_; v++) {
    all.insert(all.end(), in_.begin() + in_ptr_[v], in_.begin() + in_ptr_[v + 1]);
    all.insert(all.end(), more_.begin() + more_begin_[v], more_.begin() + more_end_[v]);
    ptr.push_back((int64_t)all.size());
  }
  return search_deadlock(n_, ptr, all, &walk_, height);
}

bool Evaluator::ordered_after(int32_t v, int32_t u) const {
  for (int64_t e = more_begin_[v]; e < more_end_[v]; e++)
    if (more_[e].node == u) return true;
  return false;
}

std::vector<double> Evaluator::cold(int32_t iterations) {
  std::vector<int64_t> height;
  if (!deadlock(&height).empty()) return {};
  std::vector<int32_t> turn((size_t)iterations * n_);
  for (size_t k = 0; k < turn.size(); k++) turn[k] = (int32_t)k;
  auto key = [&](int32_t at) { return (int64_t)(at / n_) * (n_ + 1) - height[at % n_]; };
  std::sort(turn.begin(), turn.end(), [&](int32_t a, int32_t b) { return key(a) != key(b) ? key(a) < key(b) : a < b; });
  std::vector<double> end(turn.size(), 0), free(last_.size(), 0), ends(iterations, 0);
  for (int32_t at : turn) {
    int32_t v = at % n_, i = at / n_;
    double start = 0;
    for (int64_t e = in_ptr_[v]; e < in_ptr_[v + 1]; e++)
      if (i >= in_[e].lag) start = std::max(start, end[(i - in_[e].lag) * n_ + in_[e].node]);
    if (task_[v] >= 0) {
      each_hold(v, [&](int32_t r, double) { start = std::max(start, free[r]); });
      each_hold(v, [&](int32_t r, double us) { free[r] = start + us; });
    }
    end[at] = start + us[v];
    ends[i] = std::max(ends[i], end[at]);
  }
  return ends;
}

}  // namespace stretto::sched

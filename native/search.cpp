// SPDX-License-Identifier: Apache-2.0
// One chain of the search: the paper's moves on options, or ours on options and orders together.
#include "search.h"

#include <algorithm>
#include <map>

namespace stretto::sched {
namespace {
constexpr double kNudge = 1e-6;  // of the period: just before or after
constexpr int64_t kEarliest = 16; // accepted moves after which times of large steps are made the earliest again
}

Chain::Chain(const Problem& problem, const Settings& settings, uint64_t seed, double beta)
    : beta_(beta), p_(problem), s_(settings), random_(seed), eval_(problem) {
  for (int32_t op = 0; op < p_.num_ops; op++) {
    if (p_.comm[op]) comm_.push_back(op);
    if (p_.options(op) > 1) movable_.push_back(op);
  }
  find_alike();
}

// Ops with the same numbers of tasks and the same times in all options: layers, micro-batches, and stages that are alike.
void Chain::find_alike() {
  std::map<std::vector<double>, int32_t> known;
  std::vector<int32_t> of_set(p_.option_ptr.size(), -1);
  alike_of_.assign(p_.num_ops, -1);
  for (int32_t op : movable_) {
    int32_t& number = of_set[p_.set[op]];
    if (number < 0) {
      std::vector<double> times;
      for (int32_t option = 0; option < p_.options(op); option++) {
        int64_t first = p_.first_task(op, option);
        times.push_back(-1);
        times.insert(times.end(), &p_.task_us[first], &p_.task_us[first] + p_.tasks(op, option));
      }
      number = known.try_emplace(times, (int32_t)known.size()).first->second;
    }
    alike_of_[op] = number;
    alike_.resize(known.size());
    alike_[number].push_back(op);
  }
}

double& Chain::key(State& state, int32_t v) {
  int32_t op = eval_.op[v];
  return eval_.is_task(v) ? state.task_key[p_.slot_ptr[op] + eval_.local[v]] : state.op_key[op];
}

void Chain::load_keys(const State& state, std::vector<double>& key) {
  key.resize(eval_.nodes());
  for (int32_t v = 0; v < eval_.nodes(); v++) {
    int32_t op = eval_.op[v];
    key[v] = eval_.is_task(v) ? state.task_key[p_.slot_ptr[op] + eval_.local[v]] : state.op_key[op];
  }
}

// A move changes a few ops of a large step: to copy all keys would take longer than to judge it.
void Chain::begin_move() {
  next_.tasks = now_.tasks;
  if (!same_) {
    next_ = now_, same_ = true;
  } else {
    for (int32_t op : touched_) {
      next_.choice[op] = now_.choice[op], next_.op_key[op] = now_.op_key[op];
      std::copy(&now_.task_key[p_.slot_ptr[op]], &now_.task_key[p_.slot_ptr[op + 1]], &next_.task_key[p_.slot_ptr[op]]);
    }
  }
  touched_.clear();
}

// The move is accepted. Keys of tasks that the chosen option does not have are never read.
void Chain::end_move() {
  for (int32_t op : touched_) now_.choice[op] = next_.choice[op];
  touched_.clear();
  take(now_);
  for (int32_t v = 0; v < eval_.nodes(); v++) key(next_, v) = eval_.time[v];
}

// Keeps what the evaluator has just found.
bool Chain::take(State& state) {
  state.cost = eval_.value, state.tasks = (int64_t)eval_.sequence.size();
  state.op_key.resize(p_.num_ops), state.task_key.resize(p_.slot_ptr.back());
  for (int32_t v = 0; v < eval_.nodes(); v++) key(state, v) = eval_.time[v];
  state.sequence = eval_.sequence, state.shift = eval_.shift;
  state.critical = eval_.critical, state.lag = eval_.critical_lag;
  state.circle.clear();
  for (int32_t v : state.critical) state.circle.push_back(eval_.place_of(v));
  state.held.clear();
  for (size_t k = 0; k < state.lag.size(); k++)
    state.held.push_back(eval_.ordered_after(state.critical[k], state.critical[(k + 1) % state.critical.size()]));
  return true;
}

bool Chain::settle(State& state, const std::vector<int32_t>& nodes, const std::vector<int32_t>& shift) {
  eval_.program_order();
  eval_.sequence = nodes;
  for (size_t k = 0; k < nodes.size(); k++) eval_.shift[nodes[k]] = shift[k];
  if (!eval_.deadlock().empty()) return false;
  evaluations++;
  return eval_.period() == Outcome::found && take(state);
}

bool Chain::listed(State& state, int32_t discipline) {
  eval_.choose(state.choice.data(), s_.serial);
  evaluations++;
  if (discipline == (int32_t)Discipline::fifo) {
    eval_.fifo(s_.iterations);
  } else {
    eval_.evaluate(s_.iterations, (Discipline)discipline, nullptr, 0);
  }
  return take(state);
}

bool Chain::steps(int32_t count, double scale) {
  bool better = false;
  for (int32_t k = 0; k < count; k++) {
    proposed++;
    better |= s_.joint ? step_joint(scale) : step_options(scale);
  }
  return better;
}

// Pseudocode 1 of the paper: a random comm-op gets a random option, and the list schedule says what it costs.
bool Chain::step_options(double scale) {
  if (movable_.empty()) return false;
  next_.choice = now_.choice;
  int32_t op = movable_[random_.below((int64_t)movable_.size())];
  next_.choice[op] = random_.below(p_.options(op));
  listed(next_, s_.discipline);
  double lower = (now_.cost - next_.cost) / scale;
  if (lower < 0 && random_.unit() >= std::exp(beta_ * lower)) return false;
  accepted++;
  std::swap(now_, next_);
  if (!(now_.cost < best_.cost)) return false;
  best_ = now_;
  return true;
}

bool Chain::shifts_fit() const {
  for (int32_t v : eval_.sequence)
    if (std::abs(eval_.shift[v]) > s_.max_shift) return false;
  return true;
}

// Whether to accept is decided before the cost is known: then most bad moves are given up early.
bool Chain::step_joint(double scale) {
  double limit = now_.cost - std::log(std::max(random_.unit(), 1e-300)) * scale / beta_;
  begin_move();
  const bool large = p_.num_ops >= kLargeStep;
  bool listed = false;
  double kind = random_.unit();
  if (kind >= 0.35) eval_.choose(now_.choice.data(), s_.serial);
  if (kind < 0.35) {
    if (!change_option(next_)) return false;
    if (random_.chance(0.3)) change_option(next_);
    listed = random_.chance(0.4);
  } else if (kind < 0.7) {
    if (!reverse_wait(next_) && !jump(next_, pick_op())) return false;
  } else if (kind < 0.83) {
    if (!jump(next_, pick_op())) return false;
  } else if (kind < 0.90) {
    if (!slide(next_, pick_op())) return false;
  } else if (kind < 0.94) {
    if (!exchange(next_)) return false;
  } else {
    listed = true;
  }
  if (large && next_.tasks > std::max(now_.tasks, most_tasks_)) return false;
  eval_.choose(next_.choice.data(), s_.serial);
  // Some corners are left only by several moves at once, each of which alone would be turned down.
  while (random_.chance(0.3)) random_.chance(0.6) ? jump(next_, any_op()) : slide(next_, any_op());
  load_keys(next_, key_);
  evaluations++;
  if (listed) {
    if (random_.chance(0.5)) {
      eval_.list(s_.iterations, Discipline::critical_path, nullptr, 0);
    } else {
      // From the same order to any: where a few moves at a time do not lead out of a corner, a throw of all may.
      const double share[] = {0, 0.2, 1.5};
      double noise = share[random_.below(3)] * random_.unit() * now_.cost;
      for (int32_t v = 0; v < eval_.nodes(); v++)
        if (eval_.is_task(v)) key_[v] += noise * (random_.unit() - 0.5);
      eval_.list(s_.iterations, Discipline::priority, key_.data(), now_.cost);
    }
    eval_.extract(s_.iterations, true);
  } else {
    eval_.order_by(key_, now_.cost);
  }
  // The circle that sets the period now mostly does so after the move, too: to begin there saves most passes.
  // So do most times; now and then they become the earliest again.
  Nearby nearby;
  if (large && !now_.lag.empty()) nearby.circle = &now_.circle, nearby.lags = &now_.lag;
  if (large) {
    nearby.times = listed ? &eval_.listed_times() : &key_, nearby.period = now_.cost;
    nearby.earliest = listed || accepted % kEarliest == 0;
  }
  if (!shifts_fit() || eval_.period(limit, nearby) != Outcome::found) return false;
  bool better = eval_.value < best_.cost * (1 - 1e-12);
  // Waiting without any duration in it has no positive length, so the period alone does not notice it.
  if (better && !eval_.deadlock().empty()) return false;
  accepted++;
  end_move();
  if (better) best_ = now_;
  return better;
}

// Mostly an op whose communication sets the period.
int32_t Chain::pick_op() {
  if (!now_.critical.empty() && random_.chance(0.6)) {
    found_.clear();
    for (const PlaceOfNode& at : now_.circle)
      if (at.local >= 0) found_.push_back(at.op);
    if (!found_.empty()) return found_[random_.below((int64_t)found_.size())];
  }
  return any_op();
}

// The new tasks take over the time of the old ones.
bool Chain::change_option(State& next) {
  if (movable_.empty()) return false;
  int32_t op = pick_op();
  if (p_.options(op) < 2) op = movable_[random_.below((int64_t)movable_.size())];
  if (random_.chance(0.2) && swap_options(next, op)) return true;
  int32_t old = next.choice[op], to = random_.below(p_.options(op) - 1);
  to += to >= old;
  set_option(next, op, to);
  if (alike_[alike_of_[op]].size() > 1 && random_.chance(0.3)) {
    // All layers or micro-batches at these places, or in all stages alike, change together: some options pay only if
    // others take them too.
    bool everywhere = random_.chance(0.5);
    for (int32_t other : alike_[alike_of_[op]])
      if (next.choice[other] != to && (everywhere || p_.set[other] == p_.set[op])) set_option(next, other, to);
  }
  return true;
}

// An op gives its option to another one that is alike and takes that one's: the load of all channels stays as it is.
bool Chain::swap_options(State& next, int32_t op) {
  const std::vector<int32_t>& others = alike_[alike_of_[op]];
  int32_t other = others[random_.below((int64_t)others.size())];
  int32_t mine = next.choice[op], theirs = next.choice[other];
  if (p_.set[other] != p_.set[op] || mine == theirs) return false;
  set_option(next, op, theirs), set_option(next, other, mine);
  return true;
}

void Chain::set_option(State& next, int32_t op, int32_t to) {
  touch(op);
  int32_t old = next.choice[op];
  next.tasks += p_.tasks(op, to) - p_.tasks(op, old);
  double* key = &next.task_key[p_.slot_ptr[op]];
  auto [low, high] = std::minmax_element(key, key + p_.tasks(op, old));
  double from = *low, span = *high - *low;
  int32_t count = p_.tasks(op, to);
  for (int32_t t = 0; t < count; t++) key[t] = from + span * t / count;
  next.choice[op] = to;
}

// On the circle that sets the period, something goes ahead of what it has to wait for on a channel.
bool Chain::reverse_wait(State& next) {
  found_.clear();
  for (size_t k = 0; k < now_.held.size(); k++)
    if (now_.held[k]) found_.push_back((int32_t)k);
  if (found_.empty()) return false;
  const size_t count = now_.critical.size();
  size_t k = (size_t)found_[random_.below((int64_t)found_.size())];
  int32_t v = now_.critical[k], u = v;
  int64_t lag = 0;
  size_t far = 1 + (random_.chance(0.5) ? 0 : (size_t)random_.below((int64_t)found_.size()));
  for (size_t step = 0; step < far && now_.held[k]; step++) {
    lag += now_.lag[k];
    k = (k + 1) % count;
    u = now_.critical[k];
  }
  if (u == v) return false;
  touch(eval_.op[u]), touch(eval_.op[v]);
  double there = key(next, u) - (double)lag * now_.cost, here = key(next, v), nudge = kNudge * now_.cost;
  if (random_.chance(0.3)) {
    key(next, u) = here + (double)lag * now_.cost + nudge;  // what was waited for comes afterwards
    return true;
  }
  double by = there - nudge - here;
  if (random_.chance(0.3)) {
    double* all = &next.task_key[p_.slot_ptr[eval_.op[v]]];
    for (int32_t t = 0; t < p_.tasks(eval_.op[v], next.choice[eval_.op[v]]); t++) all[t] += by;
  } else {
    key(next, v) += by;
  }
  return true;
}

// A task goes next to another one, in whichever window that is nearest.
bool Chain::jump(State& next, int32_t op) {
  int32_t other = any_op();
  int32_t v = eval_.node_of(op, random_.below(p_.tasks(op, next.choice[op])));
  int32_t u = eval_.node_of(other, random_.below(p_.tasks(other, next.choice[other])));
  if (u == v || now_.cost <= 0) return false;
  touch(op);
  double& mine = key(next, v);
  double there = key(next, u);
  there += std::round((mine - there) / now_.cost + 0.5 * (random_.unit() - 0.5)) * now_.cost;
  mine = there + (random_.chance(0.5) ? kNudge : -kNudge) * now_.cost;
  return true;
}

// Two ops change places.
bool Chain::exchange(State& next) {
  int32_t a = pick_op(), b = any_op();
  if (a == b) return false;
  touch(a), touch(b);
  double *of_a = &next.task_key[p_.slot_ptr[a]], *of_b = &next.task_key[p_.slot_ptr[b]];
  double by = of_b[0] - of_a[0];
  by -= std::round(by / now_.cost) * now_.cost;
  for (int32_t t = 0; t < p_.tasks(a, next.choice[a]); t++) of_a[t] += by;
  for (int32_t t = 0; t < p_.tasks(b, next.choice[b]); t++) of_b[t] -= by;
  return true;
}

// A whole op comes earlier or later: by a little, or by a full iteration.
bool Chain::slide(State& next, int32_t op) {
  int32_t count = p_.tasks(op, next.choice[op]);
  double by = random_.chance(0.3) ? (random_.chance(0.5) ? 1.0 : -1.0) : random_.unit() - 0.5;
  touch(op);
  double* all = &next.task_key[p_.slot_ptr[op]];
  for (int32_t t = 0; t < count; t++) all[t] += by * now_.cost;
  return true;
}

}  // namespace stretto::sched

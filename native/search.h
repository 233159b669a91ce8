// SPDX-License-Identifier: Apache-2.0
// Metropolis-Hastings over options and periodic orders.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "schedule.h"

namespace stretto::sched {

// Ops from which a move is judged by what is known of the order before, and the tasks of a plan are counted: a plan of
// more pieces than this, by those of the best start, takes longer to judge than it gains.
constexpr int32_t kLargeStep = 4000;
constexpr double kMorePieces = 1.25;

// splitmix64: small, and the same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 0x1234567) {}
  uint64_t next() {
    uint64_t x = state_ += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
  }
  double unit() { return (double)(next() >> 11) * 0x1p-53; }
  int32_t below(int64_t n) { return (int32_t)(next() % (uint64_t)n); }
  bool chance(double p) { return unit() < p; }

 private:
  uint64_t state_;
};

// A plan as the search changes it: options, and for everything the time it wants relative to its iteration's anchor.
struct State {
  std::vector<int32_t> choice;            // per op
  std::vector<double> op_key, task_key;   // per op; per slot of Problem::slot_ptr
  std::vector<int32_t> sequence, shift;   // the order itself, as Evaluator has it
  std::vector<int32_t> critical, lag;     // nodes of the circle that sets the cost, as Evaluator has them
  std::vector<uint8_t> held;              // whether that wait is one for a channel
  std::vector<PlaceOfNode> circle;        // the same nodes whatever other ops have chosen
  int64_t tasks = 0;                      // of all chosen options
  double cost = std::numeric_limits<double>::infinity();
};

struct Settings {
  bool joint = true;      // options and orders in several chains; else the paper's one chain over options
  int32_t discipline = 0; // of the list schedule where the orders are not searched
  bool serial = false;
  int32_t iterations = 4, max_shift = 1;
  double beta = 2000;     // of the coldest chain, per relative difference in cost
  double ladder = 0.4;    // beta of each next chain
};

class Chain {
 public:
  Chain(const Problem& problem, const Settings& settings, uint64_t seed, double beta);

  void start(const State& state, int64_t most_tasks) { now_ = best_ = state, same_ = false, most_tasks_ = most_tasks; }
  // Whoever changes `now_` from outside says so.
  void changed() { same_ = false; }
  bool steps(int32_t count, double scale);  // whether a better plan was found

  // The state of a given periodic order (`order` and `shift` by position in the order), or of a list schedule.
  bool settle(State& state, const std::vector<int32_t>& nodes, const std::vector<int32_t>& shift);
  bool listed(State& state, int32_t discipline);
  Evaluator& evaluator() { return eval_; }

  State now_, best_;
  double beta_;
  int64_t evaluations = 0, proposed = 0, accepted = 0;

 private:
  bool step_options(double scale);
  bool step_joint(double scale);
  bool take(State& state);
  void begin_move();
  void end_move();
  void touch(int32_t op) { touched_.push_back(op); }
  void load_keys(const State& state, std::vector<double>& key);
  int32_t any_op() { return comm_[random_.below((int64_t)comm_.size())]; }
  int32_t pick_op();
  bool change_option(State& next);
  bool swap_options(State& next, int32_t op);
  void set_option(State& next, int32_t op, int32_t to);
  void find_alike();
  bool reverse_wait(State& next);
  bool jump(State& next, int32_t op);
  bool exchange(State& next);
  bool slide(State& next, int32_t op);
  double& key(State& state, int32_t v);
  bool shifts_fit() const;

  const Problem& p_;
  const Settings& s_;
  Random random_;
  Evaluator eval_;
  State next_;                                 // as `now_`, but for the ops that a move has touched
  bool same_ = false;                          // whether that is so
  int64_t most_tasks_ = 0;                     // of a large step
  std::vector<int32_t> touched_;
  std::vector<int32_t> movable_, comm_;   // ops with several options; all comm-ops
  std::vector<int32_t> alike_of_;              // per op: its class of ops with equal options
  std::vector<std::vector<int32_t>> alike_;    // the ops of each class
  std::vector<double> key_;
  std::vector<int32_t> found_;
};

}  // namespace stretto::sched

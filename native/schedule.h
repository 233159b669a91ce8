// SPDX-License-Identifier: Apache-2.0
// Schedules of a training step: compute-ops on streams, and comm-ops cut into tasks that hold channels.
//
// A task or compute-op is a node; "v of iteration i starts `us` or more after the start of u of iteration i - lag" is an
// edge: us is u's duration, or the time that u takes of a resource that v needs next. A task has its channels to itself
// while it runs, and every link that it shares with tasks of other places for as long as its own bytes take there. Once
// the order on every resource is fixed, the steady-state period is the largest ratio of time to lag over all circles.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace stretto::sched {

constexpr int32_t kCompute = -1, kJoin = -2;  // instead of a task's position: a compute-op, the join of an op's tasks
constexpr int32_t kManyNodes = 4096;          // nodes that are walked in the order of their waits

struct Edge {
  int32_t node, lag;
  double us = 0;
};

// A node by what it is part of: -1 for a compute-op, -2 for the join of an op's tasks, else the task's position.
struct PlaceOfNode {
  int32_t op, local;
};

// A resource that a task gives back before it ends, and after what time.
struct PartHold {
  int32_t bit;
  double us;
};

// What never changes: the ops of one iteration, and for every comm-op its options.
struct Problem {
  int32_t num_ops = 0, num_words = 1, anchor = -1;
  std::vector<uint8_t> comm;           // per op
  std::vector<double> duration;        // per op, of compute-ops
  std::vector<int64_t> need_ptr;       // per op: what it waits for, its streams' order included
  std::vector<Edge> need;              // in terms of ops
  std::vector<int32_t> set;            // per op: its set of options, shared by ops that are alike; -1 without
  std::vector<int64_t> option_ptr;     // per set -> options
  std::vector<int64_t> task_ptr;       // per option -> tasks
  std::vector<double> task_us;         // per task
  std::vector<int64_t> inner_ptr;      // per task -> earlier tasks of the option, by position
  std::vector<int32_t> inner;
  std::vector<uint8_t> sink;           // per task: no other task of the option waits for it
  std::vector<uint64_t> mask[2];       // per task: resources held; [1] with the serial ones
  std::vector<uint64_t> whole[2];      // those of them that are held until the task ends
  std::vector<int64_t> part_ptr;       // per task: those that it gives back earlier
  std::vector<PartHold> part;
  std::vector<int32_t> line;           // per comm-op: its communicator, which keeps the order of submission
  int32_t num_lines = 0;
  std::vector<int32_t> topological;    // ops
  std::vector<int64_t> slot_ptr;       // per op: room for the tasks of its largest option
  double stream_load = 0;              // compute of the busiest stream

  int32_t options(int32_t op) const { return set[op] < 0 ? 0 : (int32_t)(option_ptr[set[op] + 1] - option_ptr[set[op]]); }
  int64_t first_task(int32_t op, int32_t option) const { return task_ptr[option_ptr[set[op]] + option]; }
  int32_t tasks(int32_t op, int32_t option) const {
    int64_t at = option_ptr[set[op]] + option;
    return (int32_t)(task_ptr[at + 1] - task_ptr[at]);
  }
};

// What is known of an order that differs little, where to begin: the circle that sets its period, with the lag of each of
// its waits (without it, on large steps, that of the last call); the times of this order's nodes there, and its period.
struct Nearby {
  const std::vector<PlaceOfNode>* circle = nullptr;
  const std::vector<int32_t>* lags = nullptr;
  const std::vector<double>* times = nullptr;
  double period = 0;
  bool earliest = false;  // whether the times that are found become the earliest
};

enum class Discipline : int32_t { critical_path, lifo, priority, fifo };
enum class Outcome : int32_t { found, above_limit, deadlock };

// Follows parents from every node, or from those given; the nodes of a circle, each followed by its parent, else nothing.
bool circle_of_parents(int32_t n, const std::vector<int32_t>& parent, std::vector<int32_t>& mark,
                       std::vector<int32_t>& circle, const std::vector<int32_t>* nodes = nullptr);

// A circle of waiting with a lag of at most zero, as edges `node[k] waits for node[k + 1]`; empty when there is none.
// On return `height` orders the nodes: u before v wherever v waits for u, `span` apart per iteration of lag.
std::vector<int32_t> find_deadlock(int32_t n, const std::vector<int64_t>& in_ptr, const std::vector<Edge>& in,
                                   std::vector<int64_t>* height);

// One choice of options, ready to be scheduled; all memory is reused from call to call.
class Evaluator {
 public:
  explicit Evaluator(const Problem& problem);

  void choose(const int32_t* choice, bool serial);

  // Dynamic list scheduling of so many iterations; the smallest key of the ready tasks that fit starts first.
  void list(int32_t iterations, Discipline discipline, const double* key_of_node, double key_per_iteration);
  // Periodic order (sequence, shift) from the middle iteration of what `list` did; or all in their own iteration.
  void extract(int32_t iterations, bool shifted);
  // Periodic order from the time of every node relative to its own iteration's anchor.
  void order_by(const std::vector<double>& key, double period);
  // Periodic order in program order, everything in its own iteration.
  void program_order();
  // The steady-state period of the periodic order; gives up above the limit.
  Outcome period(double limit = std::numeric_limits<double>::infinity(), const Nearby& nearby = {});
  // All of list, extract and period; where the extracted order cannot be repeated, the unshifted one.
  double evaluate(int32_t iterations, Discipline discipline, const double* key_of_node, double key_per_iteration);

  double fifo(int32_t iterations);

  // Circle of waiting under the periodic order, exactly; and the nodes' order of execution.
  std::vector<int32_t> deadlock(std::vector<int64_t>* height = nullptr);
  // Ends of the first iterations when everything starts idle.
  std::vector<double> cold(int32_t iterations);
  bool ordered_after(int32_t v, int32_t u) const;  // by a channel's order

  int32_t nodes() const { return n_; }
  int32_t node_of(int32_t op, int32_t task) const { return first_[op] + task; }
  // Times of the schedule that `extract` took an order from.
  const std::vector<double>& listed_times() const { return key_; }
  double listed_start(int32_t iteration, int32_t v) const { return start_[(size_t)iteration * n_ + v]; }
  bool is_task(int32_t v) const { return task_[v] >= 0; }
  PlaceOfNode place_of(int32_t v) const { return {op[v], local[v]}; }
  // Walks the nodes of a large step in the order of all their waits, for an order that was given from outside.
  void walk_by_waits();
  const Problem& problem() const { return p_; }

  // By node; of the last call that has it as its result.
  std::vector<int32_t> op, local;      // local: position in the option, -1 for a compute-op, -2 for a join
  std::vector<double> us;              // duration
  std::vector<double> time;            // period(): start relative to the start of the iteration's anchor
  std::vector<int32_t> shift;          // by node
  std::vector<int32_t> sequence;       // tasks in the order of a window
  std::vector<int32_t> critical;       // period(): nodes of the circle that sets it, each before what it waits for
  std::vector<int32_t> critical_lag;   // of each wait of that circle; empty where it is a channel's whole load
  double value = 0;                    // period()

 private:
  double wrap(double key, double period, int32_t& shift) const;
  void build();
  void order_edges();
  void sort_walk(const std::vector<double>& key);
  void carry_walk();
  void begin_at(const std::vector<PlaceOfNode>& circle, const std::vector<int32_t>& lags);
  bool wait_in_circle();
  bool wait_in_circle_near();
  Outcome raise_to_circle(double limit);
  Outcome raise(double limit);
  Outcome raise_near(double limit);
  void lower_to_circle(double least);
  Outcome settle_near(double limit, const Nearby& nearby);
  void make_earliest();
  bool delay(int32_t v, double same);
  void disturb(int32_t v);
  void sort_lines();
  bool lines_keep_order();
  const uint64_t* mask(int32_t v) const { return &p_.mask[serial_][(size_t)task_[v] * p_.num_words]; }
  const uint64_t* whole(int32_t v) const { return &p_.whole[serial_][(size_t)task_[v] * p_.num_words]; }
  // Visits (resource, time held) of a task.
  template <class Visit>
  void each_hold(int32_t v, Visit&& visit) const {
    const uint64_t* held = whole(v);
    for (int32_t w = 0; w < p_.num_words; w++)
      for (uint64_t bits = held[w]; bits; bits &= bits - 1) visit(w * 64 + std::countr_zero(bits), us[v]);
    for (int64_t k = p_.part_ptr[task_[v]]; k < p_.part_ptr[task_[v] + 1]; k++) visit(p_.part[k].bit, p_.part[k].us);
  }

  const Problem& p_;
  int32_t n_ = 0;
  bool serial_ = false;
  std::vector<int32_t> choice_;
  std::vector<int64_t> task_;                      // by node, global task or -1
  std::vector<int32_t> first_, end_;               // by op: first task's node, node that ends it
  std::vector<PlaceOfNode> circle_;                // of the last period() that was found, with its lags
  std::vector<int32_t> circle_lag_;
  std::vector<int32_t> old_op_, old_first_, old_end_, moved_;  // of the choice before; sort_walk
  std::vector<int64_t> in_ptr_, out_ptr_;
  std::vector<Edge> in_, out_;
  std::vector<int32_t> fill_;
  // list
  struct Ready {
    double key;
    uint64_t wants;  // the first word of its mask
    int32_t at, node;
    bool operator<(const Ready& o) const { return key != o.key ? key < o.key : at < o.at; }
  };
  struct Event {
    double at;
    int32_t what, node;
    bool operator<(const Event& o) const { return at != o.at ? at > o.at : what > o.what; }
  };
  std::vector<int32_t> left_, stack_;
  std::vector<double> tail_, start_;
  std::vector<Ready> ready_;
  std::vector<Event> events_;
  std::vector<uint64_t> busy_;
  std::vector<int64_t> line_ptr_, head_;            // fifo: tasks of every communicator, and which of them is next
  std::vector<int32_t> line_nodes_, place_in_line_, position_;
  // period
  std::vector<int32_t> run_, merged_, walk_, parent_, parent_lag_, mark_, last_, last_wrap_;
  std::vector<int64_t> more_begin_, more_end_;
  std::vector<int32_t> more_to_, more_next_, more_first_;  // the same edges from where they come from
  std::vector<int32_t> turn_;                       // by node: its position in the walk
  std::vector<int32_t> behind_;                     // nodes that wait for a later iteration, by a resource's order
  std::vector<uint64_t> dirty_, later_;             // by that position: to be looked at in this pass, and in the next
  std::vector<Edge> more_;                          // edges of the resources' order, by node
  std::vector<double> load_, phase_, key_, last_us_, parent_us_;
};

}  // namespace stretto::sched

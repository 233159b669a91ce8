// SPDX-License-Identifier: Apache-2.0
// Maximum flow between several sources and several sinks, many times over one graph.
#pragma once
#include <cstdint>
#include <vector>

namespace stretto {

// Dinic's algorithm on integers, with two changes. Distances are counted from the sinks, and a phase serves every
// source at its own distance, so phases do not multiply with the number of sources. All work is undone arc by arc, so
// a flow that stays near its sink costs nothing elsewhere.
class MaxFlow {
 public:
  static constexpr int64_t kUnlimited = int64_t(1) << 61;

  MaxFlow(int32_t num_nodes, const int32_t* src, const int32_t* dst, int64_t num_arcs);

  void set_capacity(int64_t arc, int64_t capacity) { residual_[2 * arc] = capacity_[arc] = capacity; }

  // A node may be named as a source and as a sink. Stops as soon as all the supply is used or all the demand is met.
  int64_t run(const int32_t* sources, const int64_t* supply, int64_t num_sources, const int32_t* sinks,
              const int64_t* demand, int64_t num_sinks);

  // After run: the nodes from which more could still reach a sink (the smallest sink side of a minimum cut).
  std::vector<bool> sink_side() const;

  int64_t num_arcs() const { return (int64_t)capacity_.size(); }

 private:
  bool label();
  int64_t push_from(int32_t source);
  void undo();
  bool labelled(int32_t v) const { return stamp_[v] == phase_; }
  int32_t tail(int64_t arc) const { return head_[arc ^ 1]; }

  int32_t n_;
  int64_t phase_ = 0;
  std::vector<int32_t> head_;                 // of arc 2a (forward) and 2a+1 (its reverse)
  std::vector<int64_t> ptr_, adjacent_;       // arcs that leave each node, reverse arcs among them
  std::vector<int64_t> capacity_, residual_;  // of forward arcs; of all arcs
  std::vector<int64_t> supply_, demand_;      // what is left
  std::vector<int64_t> stamp_, next_;         // phase in which a node was labelled; its current arc
  std::vector<int32_t> level_, queue_, live_, sinks_, sources_;
  std::vector<int64_t> path_, touched_;
  std::vector<bool> is_touched_;
};
}  // namespace stretto

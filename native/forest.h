// SPDX-License-Identifier: Apache-2.0
// Packing spanning trees: every terminal gets everything that the roots supply, within the capacities of the arcs.
#pragma once
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace stretto {

using Route = std::vector<int32_t>;                        // physical links
using Shares = std::vector<std::pair<int32_t, int64_t>>;  // (route, how much of an arc's capacity goes over it)

// A graph with capacities and, for every terminal, a flow of the whole supply into it. Capacities only move where all
// these flows can follow; each change repairs the flows it touches, so no flow is ever computed twice.
class Flows {
 public:
  Flows(int32_t num_nodes, const int32_t* src, const int32_t* dst, const int64_t* capacity, int64_t num_links,
        std::vector<int32_t> terminals, const int64_t* supply);

  // The first terminal that cannot be supplied, or -1.
  int32_t starved() const { return starved_; }

  // Replaces a node by direct arcs between its neighbours; false if the flows need more than its balance allows.
  bool remove_node(int32_t w);

  int32_t arc(int32_t u, int32_t v) const { return table_[(int64_t)u * n_ + v]; }
  int64_t capacity(int32_t a) const { return capacity_[a]; }
  Shares& shares(int32_t a) { return shares_[a]; }
  const std::vector<Route>& routes() const { return routes_; }
  int32_t num_nodes() const { return n_; }
  int32_t degree(int32_t v) const { return (int32_t)ends_[v].size(); }

 private:
  int32_t add_arc(int32_t u, int32_t v);
  int64_t reroute(std::vector<int64_t>& flow, int32_t from, int32_t to, int64_t amount);
  int64_t excess(const std::vector<int64_t>& flow, int32_t a) const { return flow[a] - capacity_[a]; }
  int64_t repair(std::vector<int64_t>& flow, int32_t a, int32_t b, int32_t direct);
  int64_t shrink(int32_t a, int32_t b, int32_t direct, int64_t amount);
  void trim(int32_t w, bool inward, int64_t surplus);
  int64_t drop(int32_t a, int64_t amount);
  void split(int32_t a, int32_t b, int64_t amount);
  int32_t intern(Route route);
  void distances(int32_t from, int32_t without);
  Shares take(int32_t a, int64_t amount);

  int32_t n_, starved_ = -1;
  std::vector<int32_t> tail_, head_, table_;
  std::vector<int64_t> capacity_;
  std::vector<std::vector<int32_t>> ends_;  // of each node: 2 * arc where it begins, 2 * arc + 1 where it ends
  std::vector<Shares> shares_;
  std::vector<Route> routes_;
  std::map<Route, int32_t> number_;
  std::vector<int32_t> terminals_;
  std::vector<std::vector<int64_t>> flow_;  // of each terminal, on each arc
  std::vector<int32_t> order_;              // terminals, the one that failed last first
  std::vector<int32_t> via_, queue_, far_;
  std::vector<int64_t> stamp_;
  int64_t clock_ = 0;
};

struct Tree {
  int32_t root;
  int64_t amount;
  std::vector<std::pair<int32_t, int32_t>> edges;  // parents come first
};
}  // namespace stretto

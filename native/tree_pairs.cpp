// SPDX-License-Identifier: Apache-2.0
// All-reduce along pairs of trees: the cheapest trees at given prices of links, and the times of messages that ranks
// send in an order of their own.
#include <algorithm>
#include <limits>
#include <queue>
#include <stdexcept>

#include "arrays.h"

namespace stretto {
namespace {

constexpr double kFar = std::numeric_limits<double>::infinity();

// The cheapest arborescence of a complete graph (Chu-Liu and Edmonds): `parent[v]` of every vertex but the root.
// `cost[u * n + v]` is what the edge u -> v costs.
class Arborescence {
 public:
  std::vector<int32_t> run(std::vector<double> cost, int32_t n, int32_t root) {
    for (int32_t v = 0; v < n; v++) cost[(size_t)v * n + v] = kFar;
    return solve(cost, n, root);
  }

 private:
  static std::vector<int32_t> solve(const std::vector<double>& cost, int32_t n, int32_t root) {
    auto at = [&](int32_t u, int32_t v) { return cost[(size_t)u * n + v]; };
    std::vector<int32_t> parent(n, root);
    for (int32_t v = 0; v < n; v++) {
      if (v == root) continue;
      for (int32_t u = 0; u < n; u++)
        if (u != v && at(u, v) < at(parent[v], v)) parent[v] = u;
    }
    auto circle = find_circle(parent, root);
    if (circle.empty()) return parent;
    // The circle becomes one vertex, the last; entering it at v costs what v's edge of the circle saves.
    std::vector<uint8_t> inside(n, 0);
    for (int32_t v : circle) inside[v] = 1;
    std::vector<int32_t> rest;
    for (int32_t v = 0; v < n; v++)
      if (!inside[v]) rest.push_back(v);
    auto k = (int32_t)rest.size();
    std::vector<double> small((size_t)(k + 1) * (k + 1), kFar);
    std::vector<int32_t> entry(k, circle[0]), leave(k, circle[0]);
    int32_t new_root = 0;
    for (int32_t i = 0; i < k; i++) {
      if (rest[i] == root) new_root = i;
      for (int32_t j = 0; j < k; j++)
        if (i != j) small[(size_t)i * (k + 1) + j] = at(rest[i], rest[j]);
      double in = kFar, out = kFar;
      for (int32_t v : circle) {
        double enters = at(rest[i], v) - at(parent[v], v);
        if (enters < in) in = enters, entry[i] = v;
        if (at(v, rest[i]) < out) out = at(v, rest[i]), leave[i] = v;
      }
      small[(size_t)i * (k + 1) + k] = in;
      small[(size_t)k * (k + 1) + i] = out;
    }
    auto found = solve(small, k + 1, new_root);
    for (int32_t i = 0; i < k; i++)
      if (rest[i] != root) parent[rest[i]] = found[i] == k ? leave[i] : rest[found[i]];
    parent[entry[found[k]]] = rest[found[k]];
    return parent;
  }

  static std::vector<int32_t> find_circle(const std::vector<int32_t>& parent, int32_t root) {
    auto n = (int32_t)parent.size();
    std::vector<int32_t> seen(n, -1);
    for (int32_t v = 0; v < n; v++) {
      int32_t u = v;
      while (u != root && seen[u] < 0) seen[u] = v, u = parent[u];
      if (u == root || seen[u] != v) continue;
      std::vector<int32_t> circle{u};
      for (int32_t w = parent[u]; w != u; w = parent[w]) circle.push_back(w);
      return circle;
    }
    return {};
  }
};

// Hops from rank to rank at given prices of links, over nodes that pass on (switches, NICs, devices that forward), and for
// every root the cheapest tree that spreads from it and the cheapest that reduces to it.
nb::object cheapest_trees(int32_t num_nodes, In<int32_t> src, In<int32_t> dst, In<double> price, In<bool> passes,
                          In<int32_t> rank_node) {
  auto links = (int64_t)src.shape(0);
  auto n = (int32_t)rank_node.shape(0);
  if ((int64_t)dst.shape(0) != links || (int64_t)price.shape(0) != links || (int64_t)passes.shape(0) != num_nodes)
    throw std::invalid_argument("cheapest_trees: arrays differ in length");
  std::vector<int64_t> begin(num_nodes + 1, 0);
  for (int64_t l = 0; l < links; l++) {
    if (src.data()[l] < 0 || src.data()[l] >= num_nodes || dst.data()[l] < 0 || dst.data()[l] >= num_nodes)
      throw std::out_of_range("cheapest_trees: no such node");
    begin[src.data()[l] + 1]++;
  }
  std::vector<int32_t> rank_of(num_nodes, -1);
  for (int32_t r = 0; r < n; r++) {
    if (rank_node.data()[r] < 0 || rank_node.data()[r] >= num_nodes)
      throw std::out_of_range("cheapest_trees: no such node");
    rank_of[rank_node.data()[r]] = r;
  }
  std::vector<double> cost((size_t)n * n, kFar);
  std::vector<int64_t> path_ptr((size_t)n * n + 1, 0);
  std::vector<int32_t> path, spread((size_t)n * n), gather((size_t)n * n);
  std::vector<double> total(n, 0.0);
  {
    nb::gil_scoped_release release;
    for (int32_t v = 0; v < num_nodes; v++) begin[v + 1] += begin[v];
    std::vector<int32_t> out(links);
    {
      std::vector<int64_t> at(begin.begin(), begin.end() - 1);
      for (int64_t l = 0; l < links; l++) out[at[src.data()[l]]++] = (int32_t)l;
    }
    using Item = std::pair<double, int32_t>;
    std::vector<double> far(num_nodes);
    std::vector<int32_t> via(num_nodes);
    for (int32_t r = 0; r < n; r++) {
      std::fill(far.begin(), far.end(), kFar);
      std::fill(via.begin(), via.end(), -1);
      std::priority_queue<Item, std::vector<Item>, std::greater<>> queue;
      int32_t home = rank_node.data()[r];
      far[home] = 0;
      queue.push({0.0, home});
      while (!queue.empty()) {
        auto [d, v] = queue.top();
        queue.pop();
        if (d > far[v] || (v != home && (rank_of[v] >= 0 || !passes.data()[v]))) continue;
        for (int64_t k = begin[v]; k < begin[v + 1]; k++) {
          int32_t l = out[k], w = dst.data()[l];
          if (d + price.data()[l] < far[w]) far[w] = d + price.data()[l], via[w] = l, queue.push({far[w], w});
        }
      }
      for (int32_t s = 0; s < n; s++) {
        int32_t v = rank_node.data()[s];
        if (s != r && far[v] < kFar) {
          cost[(size_t)r * n + s] = far[v];
          auto first = (int64_t)path.size();
          for (; v != home; v = src.data()[via[v]]) path.push_back(via[v]);
          std::reverse(path.begin() + first, path.end());
        }
        path_ptr[(size_t)r * n + s + 1] = (int64_t)path.size();
      }
    }
    std::vector<double> back((size_t)n * n);
    for (int32_t u = 0; u < n; u++)
      for (int32_t v = 0; v < n; v++) back[(size_t)v * n + u] = cost[(size_t)u * n + v];
    for (int32_t r = 0; r < n; r++) {
      auto down = Arborescence().run(cost, n, r), up = Arborescence().run(back, n, r);
      for (int32_t v = 0; v < n; v++) {
        spread[(size_t)r * n + v] = v == r ? -1 : down[v];
        gather[(size_t)r * n + v] = v == r ? -1 : up[v];
        if (v != r) total[r] += cost[(size_t)down[v] * n + v] + cost[(size_t)v * n + up[v]];
      }
    }
  }
  return nb::make_tuple(to_numpy(std::move(total)), to_numpy(std::move(spread)), to_numpy(std::move(gather)),
                        to_numpy(std::move(path_ptr)), to_numpy(std::move(path)));
}

// The times of messages where every sender's first link serves the waiting message of the smallest `rank`, and all other
// links serve in order of request, as a network does. A message without dependencies waits for its release.
class SendOrder {
 public:
  Rows<int32_t> after, links;
  const int32_t* route;
  const double *bytes, *alpha, *rate, *release, *extra;
  const int64_t* rank;
  bool blocks;

  void run(int64_t count, int64_t num_links, std::vector<double>& start, std::vector<double>& arrive) {
    std::vector<int32_t> waits(count);
    std::vector<int64_t> follow_ptr(count + 1, 0);
    for (int64_t t = 0; t < count; t++) {
      waits[t] = (int32_t)after.size(t);
      for (auto* b = after.begin(t); b != after.end(t); b++) follow_ptr[*b + 1]++;
    }
    for (int64_t t = 0; t < count; t++) follow_ptr[t + 1] += follow_ptr[t];
    std::vector<int32_t> follow(follow_ptr[count]);
    {
      std::vector<int64_t> at(follow_ptr.begin(), follow_ptr.end() - 1);
      for (int64_t t = 0; t < count; t++)
        for (auto* b = after.begin(t); b != after.end(t); b++) follow[at[*b]++] = (int32_t)t;
    }
    using Waiting = std::pair<int64_t, int32_t>;
    std::vector<std::priority_queue<Waiting, std::vector<Waiting>, std::greater<>>> queue(num_links);
    std::vector<double> free_at(num_links, 0.0);
    struct Event {
      double at;
      int32_t what;  // a message that arrives (>= 0), a link that is free (-1 - link)
      bool operator>(const Event& o) const { return at != o.at ? at > o.at : what > o.what; }
    };
    std::priority_queue<Event, std::vector<Event>, std::greater<>> events, releases;
    for (int64_t t = 0; t < count; t++)
      if (!waits[t]) releases.push({release[t], (int32_t)t});
    std::vector<int32_t> touched;
    int64_t started = 0;
    auto wait_for_link = [&](int32_t t) {
      int32_t first = *links.begin(route[t]);
      queue[first].push({rank[t], t});
      touched.push_back(first);
    };
    while (!events.empty() || !releases.empty()) {
      double now = kFar;
      if (!events.empty()) now = events.top().at;
      if (!releases.empty()) now = std::min(now, releases.top().at);
      double until = now + 1e-12 * now;
      while (!releases.empty() && releases.top().at <= until) wait_for_link(releases.top().what), releases.pop();
      while (!events.empty() && events.top().at <= until) {
        int32_t what = events.top().what;
        events.pop();
        if (what < 0) {
          touched.push_back(-1 - what);
          continue;
        }
        for (int64_t k = follow_ptr[what]; k < follow_ptr[what + 1]; k++)
          if (--waits[follow[k]] == 0) wait_for_link(follow[k]);
      }
      for (int32_t first : touched) {
        if (queue[first].empty() || free_at[first] > until) continue;
        int32_t t = queue[first].top().second;
        queue[first].pop();
        start[t] = now;
        double head = now, tail = now;
        for (auto* l = links.begin(route[t]); l != links.end(route[t]); l++) {
          double begins = std::max(head, free_at[*l]), us = bytes[t] / rate[*l] + (blocks ? alpha[*l] : 0.0);
          free_at[*l] = begins + us;
          head = begins + alpha[*l];
          tail = std::max(tail, begins + us) + (blocks ? 0.0 : alpha[*l]);
        }
        arrive[t] = tail + extra[t];
        events.push({arrive[t], t});
        events.push({free_at[first], -1 - first});
        started++;
      }
      touched.clear();
    }
    // Links out of a rank are first links only, since ranks do not pass on; then every message has had its turn.
    if (started != count) throw std::invalid_argument("time_sends: a first link of one route is a later link of another");
  }
};

nb::object time_sends(In<int64_t> after_ptr, In<int32_t> after, In<int32_t> route, In<int64_t> route_ptr,
                      In<int32_t> route_links, In<double> bytes, In<double> extra_us, In<double> alpha_us,
                      In<double> bytes_per_us, In<int64_t> rank, In<double> release_us, bool alpha_blocks) {
  auto count = (int64_t)route.shape(0);
  auto links = (int64_t)alpha_us.shape(0);
  for (auto size : {bytes.shape(0), extra_us.shape(0), rank.shape(0), release_us.shape(0), after_ptr.shape(0) - 1})
    if ((int64_t)size != count) throw std::invalid_argument("time_sends: arrays differ in length");
  for (size_t k = 0; k < route_links.shape(0); k++)
    if (route_links.data()[k] < 0 || route_links.data()[k] >= links) throw std::out_of_range("time_sends: no such link");
  for (int64_t t = 0; t < count; t++) {
    int32_t r = route.data()[t];
    if (r < 0 || r + 1 >= (int64_t)route_ptr.shape(0) || route_ptr.data()[r + 1] <= route_ptr.data()[r])
      throw std::out_of_range("time_sends: a message has no route");
    for (int64_t k = after_ptr.data()[t]; k < after_ptr.data()[t + 1]; k++)
      if (after.data()[k] < 0 || after.data()[k] >= t) throw std::out_of_range("time_sends: after must name earlier messages");
  }
  std::vector<double> start(count, 0.0), arrive(count, 0.0);
  {
    nb::gil_scoped_release release;
    SendOrder order{{after_ptr.data(), after.data()}, {route_ptr.data(), route_links.data()}, route.data(), bytes.data(),
                    alpha_us.data(), bytes_per_us.data(), release_us.data(), extra_us.data(), rank.data(), alpha_blocks};
    order.run(count, links, start, arrive);
  }
  return nb::make_tuple(to_numpy(std::move(start)), to_numpy(std::move(arrive)));
}

}  // namespace

void bind_tree_pairs(nb::module_& m) {
  m.def("cheapest_trees", &cheapest_trees, nb::arg("num_nodes"), nb::arg("src"), nb::arg("dst"), nb::arg("price"),
        nb::arg("passes"), nb::arg("rank_node"));
  m.def("time_sends", &time_sends, nb::arg("after_ptr"), nb::arg("after"), nb::arg("route"), nb::arg("route_ptr"),
        nb::arg("route_links"), nb::arg("bytes"), nb::arg("extra_us"), nb::arg("alpha_us"), nb::arg("bytes_per_us"),
        nb::arg("rank"), nb::arg("release_us"), nb::arg("alpha_blocks"));
}
}  // namespace stretto

// SPDX-License-Identifier: Apache-2.0
// All-to-all as flows: chunks routed so that no link is crowded, and messages timed where links serve by priority.
#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>
#include <random>
#include <stdexcept>

#include "arrays.h"

namespace stretto {
namespace {

struct Graph {
  int32_t nodes;
  const int32_t *src, *dst;
  std::vector<int64_t> ptr;
  std::vector<int32_t> out;

  Graph(int32_t n, const int32_t* s, const int32_t* d, int64_t arcs) : nodes(n), src(s), dst(d), ptr(n + 1, 0) {
    for (int64_t a = 0; a < arcs; a++) {
      if (s[a] < 0 || s[a] >= n || d[a] < 0 || d[a] >= n) throw std::out_of_range("arc: no such node");
      ptr[s[a] + 1]++;
    }
    for (int32_t v = 0; v < n; v++) ptr[v + 1] += ptr[v];
    out.resize(arcs);
    std::vector<int64_t> at(ptr.begin(), ptr.end() - 1);
    for (int64_t a = 0; a < arcs; a++) out[at[s[a]]++] = (int32_t)a;
  }
};

// Each item takes one path; an arc uses one or more links, takes size/rate of each, and once, when its first item comes,
// `open` of each (what a message costs whatever its size). A path costs what it adds to sum(exp(sharpness x load)), and a
// little for its length; the sharpness grows until only the worst links count. Items are taken out and put back one by
// one until none moves.
class Router {
 public:
  struct Costs {
    Rows<int32_t> uses;
    const double *rate, *open, *base;
    const bool* relays;
    int64_t num_links;
  };
  struct Items {
    const int32_t *from, *to;
    const double* size;
    int32_t count;
  };

  Router(const Graph& g, const Costs& costs, const Items& items)
      : g_(g), c_(costs), i_(items), load_(costs.num_links, 0.0), jitter_(g.out.size(), 1.0), far_(g.nodes),
        users_(g.out.size(), 0), via_(g.nodes), path_(items.count) {}

  void run(double target, double last_sharpness, int32_t sweeps, int32_t steps, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<int32_t> order(i_.count);
    for (int32_t i = 0; i < i_.count; i++) order[i] = i;
    for (double sharp = 8; sharp <= last_sharpness; sharp *= 2) {
      sharp_ = sharp;
      for (int32_t sweep = 0; sweep < sweeps; sweep++) {
        for (int32_t i = i_.count - 1; i > 0; i--) std::swap(order[i], order[random() % (uint64_t)(i + 1)]);
        double hot = worst() * (1 - 6 / sharp);
        int64_t moved = 0;
        for (int32_t i : order)
          if (path_[i].empty() || sharp < 16 || passes(i, hot)) moved += reroute(i);
        keep_best();
        if (best_worst_ <= target) return;
        if (moved == 0) break;
      }
    }
    walk(target, steps, random);
  }

  double best_worst() const { return best_worst_; }
  nb::object best() {
    std::vector<int64_t> ptr{0};
    std::vector<int32_t> arcs;
    for (auto& path : best_) {
      arcs.insert(arcs.end(), path.begin(), path.end());
      ptr.push_back((int64_t)arcs.size());
    }
    return nb::make_tuple(to_numpy(std::move(ptr)), to_numpy(std::move(arcs)));
  }

 private:
  // Nothing is left to win item by item: let what is too much wander from link to link, by breaking ties at random,
  // until it meets room.
  void walk(double target, int32_t steps, std::mt19937_64& random) {
    std::uniform_real_distribution<double> some(0.9, 1.1);
    double least = best_worst_;
    for (int32_t step = 0, idle = 0; step < steps && idle < steps / 4 && best_worst_ > target; step++, idle++) {
      for (double& each : jitter_) each = some(random);
      double hot = std::max(target, worst() * (1 - 1e-9));
      for (int32_t i = 0; i < i_.count; i++)
        if (passes(i, hot)) reroute(i);
      keep_best();
      if (best_worst_ < least * (1 - 1e-9)) least = best_worst_, idle = 0;
    }
  }

  template <class F>
  void each_link(int32_t arc, F&& f) const {
    for (const int32_t* l = c_.uses.begin(arc); l != c_.uses.end(arc); l++) f(*l);
  }

  void add(int32_t i, int32_t sign) {
    for (int32_t a : path_[i]) {
      bool opens = sign > 0 ? users_[a] == 0 : users_[a] == 1;
      users_[a] += sign;
      each_link(a, [&](int32_t l) { load_[l] += sign * (i_.size[i] / c_.rate[l] + (opens ? c_.open[l] : 0)); });
    }
  }

  bool passes(int32_t i, double hot) const {
    bool found = false;
    for (int32_t a : path_[i]) each_link(a, [&](int32_t l) { found |= load_[l] >= hot; });
    return found;
  }

  double worst() const {
    double most = 0;
    for (double each : load_) most = std::max(most, each);
    return most;
  }

  // Those who share a message share its fixed cost, so that items gather in few messages.
  double length(int32_t a, double size) const {
    double total = c_.base[a], share = 1.0 / (1.0 + users_[a]);
    each_link(a, [&](int32_t l) {
      double more = size / c_.rate[l] + c_.open[l] * share;
      double now = std::exp(std::min(50.0, sharp_ * (load_[l] - 1)));
      total += now * std::expm1(std::min(50.0, sharp_ * more)) / sharp_;
    });
    return jitter_[a] * total;
  }

  bool reroute(int32_t i) {
    int32_t source = i_.from[i], sink = i_.to[i];
    if (!path_[i].empty()) add(i, -1);
    double size = i_.size[i], old = 0;
    for (int32_t a : path_[i]) old += length(a, size);
    std::fill(far_.begin(), far_.end(), std::numeric_limits<double>::infinity());
    heap_.clear();
    far_[source] = 0, via_[source] = -1;
    heap_.push_back({0.0, source});
    while (!heap_.empty()) {
      std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
      auto [d, u] = heap_.back();
      heap_.pop_back();
      if (d > far_[u]) continue;
      if (u == sink) break;
      if (u != source && !c_.relays[u]) continue;
      for (int64_t e = g_.ptr[u]; e < g_.ptr[u + 1]; e++) {
        int32_t a = g_.out[e], v = g_.dst[a];
        if (far_[v] <= d) continue;
        double there = d + length(a, size);
        if (there < far_[v]) {
          far_[v] = there, via_[v] = a;
          heap_.push_back({there, v});
          std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
        }
      }
    }
    if (!std::isfinite(far_[sink])) throw std::invalid_argument("no path");
    bool moves = path_[i].empty() || far_[sink] < old * (1 - 1e-9);
    if (moves) {
      path_[i].clear();
      for (int32_t v = sink; v != source; v = g_.src[via_[v]]) path_[i].push_back(via_[v]);
      std::reverse(path_[i].begin(), path_[i].end());
    }
    add(i, 1);
    return moves;
  }

  void keep_best() {
    double now = worst(), total = 0;
    for (int32_t i = 0; i < i_.count; i++)
      for (int32_t a : path_[i]) total += c_.base[a] * i_.size[i];
    bool better = now < best_worst_ * (1 - 1e-9) || (now <= best_worst_ * (1 + 1e-9) && total < best_total_);
    if (better) best_worst_ = now, best_total_ = total, best_ = path_;
  }

  const Graph& g_;
  const Costs c_;
  const Items i_;
  double sharp_ = 1, best_worst_ = std::numeric_limits<double>::infinity(), best_total_ = 0;
  std::vector<double> load_, jitter_, far_;
  std::vector<int32_t> users_, via_;
  std::vector<std::pair<double, int32_t>> heap_;
  std::vector<std::vector<int32_t>> path_, best_;
};

nb::object route_items(int32_t num_nodes, In<int32_t> src, In<int32_t> dst, In<int64_t> use_ptr, In<int32_t> use,
                       In<bool> relays, In<double> base, In<double> rate, In<double> open, In<int32_t> from,
                       In<int32_t> to, In<double> size, double target, double sharpness, int32_t sweeps,
                       int32_t walk, uint64_t seed) {
  size_t arcs = src.shape(0), items = from.shape(0);
  if (dst.shape(0) != arcs || base.shape(0) != arcs || use_ptr.shape(0) != arcs + 1 ||
      use_ptr.data()[arcs] != (int64_t)use.shape(0) || (int32_t)relays.shape(0) != num_nodes ||
      open.shape(0) != rate.shape(0) || to.shape(0) != items || size.shape(0) != items)
    throw std::invalid_argument("route_items: arrays differ in length");
  Graph graph(num_nodes, src.data(), dst.data(), (int64_t)arcs);
  Router router(graph,
                {{use_ptr.data(), use.data()}, rate.data(), open.data(), base.data(), relays.data(),
                 (int64_t)rate.shape(0)},
                {from.data(), to.data(), size.data(), (int32_t)items});
  {
    nb::gil_scoped_release release;
    router.run(target, sharpness, sweeps, walk, seed);
  }
  nb::object paths = router.best();
  return nb::make_tuple(paths[0], paths[1], router.best_worst());
}

// When each message starts and ends where every link serves, of those that wait for it, the one with the lowest key.
struct Request {
  double key;
  int32_t message;
  bool operator>(const Request& o) const { return key != o.key ? key > o.key : message > o.message; }
};
struct Moment {
  double time;
  int32_t message;  // or -1 - link: the link is free again
  bool operator>(const Moment& o) const { return time != o.time ? time > o.time : message > o.message; }
};
template <class T>
using Least = std::priority_queue<T, std::vector<T>, std::greater<T>>;

nb::object plan(In<int64_t> after_ptr, In<int32_t> after, In<int32_t> route, In<int64_t> route_ptr,
                In<int32_t> route_links, In<double> bytes, In<double> alpha, In<double> rate, In<double> key,
                bool alpha_blocks) {
  auto count = (int32_t)route.shape(0);
  auto links = (int32_t)alpha.shape(0);
  std::vector<double> start(count, -1), end(count, -1);
  {
    nb::gil_scoped_release release;
    Rows<int32_t> waits{after_ptr.data(), after.data()}, routes{route_ptr.data(), route_links.data()};
    std::vector<int32_t> left(count), hop(count, -1);
    std::vector<int64_t> then_ptr(count + 1, 0);
    for (int64_t i = 0; i < waits.ptr[count]; i++) then_ptr[after.data()[i] + 1]++;
    for (int32_t t = 0; t < count; t++) then_ptr[t + 1] += then_ptr[t];
    std::vector<int32_t> then(then_ptr[count]);
    std::vector<int64_t> at(then_ptr.begin(), then_ptr.end() - 1);
    for (int32_t t = 0; t < count; t++)
      for (const int32_t* w = waits.begin(t); w != waits.end(t); w++) then[at[*w]++] = t;
    std::vector<Least<Request>> queue(links);
    std::vector<bool> busy(links, false), listed(links, false);
    std::vector<int32_t> touched;
    Least<Moment> moments;
    auto touch = [&](int32_t link) {
      if (!listed[link]) listed[link] = true, touched.push_back(link);
    };
    auto ask = [&](int32_t t) {
      int32_t link = routes.begin(route.data()[t])[++hop[t]];
      queue[link].push({key.data()[t], t});
      touch(link);
    };
    auto serve = [&](double now) {
      for (size_t i = 0; i < touched.size(); i++) {
        int32_t link = touched[i];
        listed[link] = false;
        if (busy[link] || queue[link].empty()) continue;
        int32_t t = queue[link].top().message;
        queue[link].pop();
        busy[link] = true;
        double takes = bytes.data()[t] / rate.data()[link], late = alpha.data()[link];
        if (hop[t] == 0) start[t] = now;
        moments.push({now + takes + (alpha_blocks ? late : 0), -1 - link});
        double tail = now + takes + late;
        if (hop[t] + 1 < routes.size(route.data()[t])) {
          int32_t next = routes.begin(route.data()[t])[hop[t] + 1];
          moments.push({std::max(now + late, tail - bytes.data()[t] / rate.data()[next]), t});
        } else {
          end[t] = tail;
          moments.push({tail, t});
        }
      }
      touched.clear();
    };
    for (int32_t t = 0; t < count; t++) {
      left[t] = (int32_t)waits.size(t);
      if (!left[t]) ask(t);
    }
    serve(0);
    while (!moments.empty()) {
      double now = moments.top().time, until = now + 1e-12 * std::max(1.0, now);
      while (!moments.empty() && moments.top().time <= until) {
        auto [time, t] = moments.top();
        moments.pop();
        if (t < 0) {
          busy[-1 - t] = false;
          touch(-1 - t);
        } else if (hop[t] + 1 < routes.size(route.data()[t])) {
          ask(t);
        } else {
          for (int64_t i = then_ptr[t]; i < then_ptr[t + 1]; i++)
            if (!--left[then[i]]) ask(then[i]);
        }
      }
      serve(now);
    }
  }
  return nb::make_tuple(to_numpy(std::move(start)), to_numpy(std::move(end)));
}

// Colours for the edges of a bipartite graph, as few as its largest degree: those of a colour meet nowhere.
nb::object colour_edges(In<int32_t> left, In<int32_t> right, int32_t num_left, int32_t num_right) {
  auto count = (int32_t)left.shape(0);
  std::vector<int32_t> colour(count, -1), degree((size_t)num_left + num_right, 0);
  if (right.shape(0) != left.shape(0)) throw std::invalid_argument("colour_edges: arrays differ in length");
  for (int32_t e = 0; e < count; e++) {
    if (left.data()[e] < 0 || left.data()[e] >= num_left || right.data()[e] < 0 || right.data()[e] >= num_right)
      throw std::out_of_range("colour_edges: no such node");
    degree[left.data()[e]]++, degree[num_left + right.data()[e]]++;
  }
  {
    nb::gil_scoped_release release;
    int64_t most = degree.empty() ? 0 : *std::max_element(degree.begin(), degree.end());
    std::vector<int32_t> edge(degree.size() * (size_t)most, -1);  // the edge of a colour at a node
    auto at = [&](int32_t node, int32_t c) -> int32_t& { return edge[(size_t)node * (size_t)most + (size_t)c]; };
    auto unused = [&](int32_t node) {
      int32_t c = 0;
      while (at(node, c) >= 0) c++;
      return c;
    };
    for (int32_t e = 0; e < count; e++) {
      int32_t u = left.data()[e], v = num_left + right.data()[e];
      int32_t a = unused(u), b = unused(v);
      if (a != b && at(v, a) >= 0) {
        // The path from v over edges of colours a, b, a, ... never comes to u: swap the two along it.
        std::vector<int32_t> path;
        for (int32_t node = v, c = a; at(node, c) >= 0; c = a + b - c) {
          int32_t f = at(node, c), x = left.data()[f], y = num_left + right.data()[f];
          path.push_back(f);
          node = node == x ? y : x;
        }
        for (int32_t f : path) at(left.data()[f], colour[f]) = at(num_left + right.data()[f], colour[f]) = -1;
        for (int32_t f : path) {
          colour[f] = a + b - colour[f];
          at(left.data()[f], colour[f]) = at(num_left + right.data()[f], colour[f]) = f;
        }
      }
      colour[e] = a;
      at(u, a) = at(v, a) = e;
    }
  }
  return to_numpy(std::move(colour));
}

}  // namespace

void bind_flow(nb::module_& m) {
  m.def("route_items", &route_items, nb::arg("num_nodes"), nb::arg("src"), nb::arg("dst"), nb::arg("use_ptr"),
        nb::arg("use"), nb::arg("relays"), nb::arg("base"), nb::arg("rate"), nb::arg("open"), nb::arg("from_node"),
        nb::arg("to_node"), nb::arg("size"), nb::arg("target"), nb::arg("sharpness"), nb::arg("sweeps"),
        nb::arg("walk"), nb::arg("seed"));
  m.def("plan_messages", &plan, nb::arg("after_ptr"), nb::arg("after"), nb::arg("route"), nb::arg("route_ptr"),
        nb::arg("route_links"), nb::arg("bytes"), nb::arg("alpha_us"), nb::arg("bytes_per_us"), nb::arg("key"),
        nb::arg("alpha_blocks"));
  m.def("colour_edges", &colour_edges, nb::arg("left"), nb::arg("right"), nb::arg("num_left"), nb::arg("num_right"));
}
}  // namespace stretto

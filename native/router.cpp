// SPDX-License-Identifier: Apache-2.0
// Routes by time: for every pair the routes that are best for some size, and of these the one for the size at hand.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <queue>
#include <unordered_map>
#include <utility>

#include "arrays.h"

namespace stretto {
namespace {

constexpr int64_t kManyPaths = int64_t(1) << 40;
constexpr int64_t kUnknown = -1;
constexpr size_t kMemory = 1 << 20;  // pairs that are remembered
// Latencies are whole picoseconds: their sums do not depend on the order of the links, so equal routes stay equal.
constexpr double kPicosecondsPerUs = 1e6;

// The routes to a node of this latency and this number of links whose slowest link has this rate.
struct Label {
  int64_t ps;
  int32_t hops;
  double rate;

  // In microseconds, for a message alone.
  double time(double nbytes) const { return ps / kPicosecondsPerUs + nbytes / (rate * 1e3); }
};

struct Reached {
  Label label;
  int32_t node;

  bool operator>(const Reached& other) const {
    if (label.ps != other.label.ps) return label.ps > other.label.ps;
    if (label.hops != other.label.hops) return label.hops > other.label.hops;
    return label.rate < other.label.rate;
  }
};

// For one source and the links of at least some rate: how many best routes lead to each node, and the links that end
// them, in the order in which the routes are numbered.
struct BestRoutes {
  std::vector<int64_t> count;
  std::vector<int32_t> begin, link;
};

class Router {
 public:
  Router(int32_t num_nodes, In<int32_t> src, In<int32_t> dst, In<double> alpha_us, In<double> rate, In<bool> allowed,
         In<bool> forwards)
      : n_(num_nodes),
        from_(src.data(), src.data() + src.shape(0)),
        to_(dst.data(), dst.data() + dst.shape(0)),
        rate_(rate.data(), rate.data() + rate.shape(0)),
        forwards_(forwards.data(), forwards.data() + forwards.shape(0)),
        widest_in_(num_nodes, 0.0),
        widest_out_(num_nodes, 0.0),
        labels_(num_nodes) {
    for (size_t l = 0; l < from_.size(); l++) ps_.push_back(std::llround(alpha_us.data()[l] * kPicosecondsPerUs));
    // Presets and files put the latency of a path on one of its links. A link without latency is not free: it counts
    // as the shortest latency of any link, or else small messages would turn round in a NIC rather than use NVLink.
    int64_t least = 0;
    for (size_t l = 0; l < ps_.size(); l++)
      if (allowed.data()[l] && ps_[l] > 0 && (!least || ps_[l] < least)) least = ps_[l];
    for (int64_t& ps : ps_) ps = std::max(ps, least);
    out_ptr_.assign(n_ + 1, 0);
    in_ptr_.assign(n_ + 1, 0);
    for (size_t l = 0; l < from_.size(); l++) {
      if (!allowed.data()[l]) continue;
      out_ptr_[from_[l] + 1]++, in_ptr_[to_[l] + 1]++;
      widest_out_[from_[l]] = std::max(widest_out_[from_[l]], rate_[l]);
      widest_in_[to_[l]] = std::max(widest_in_[to_[l]], rate_[l]);
    }
    for (int32_t v = 0; v < n_; v++) out_ptr_[v + 1] += out_ptr_[v], in_ptr_[v + 1] += in_ptr_[v];
    out_.resize(out_ptr_[n_]);
    in_.resize(in_ptr_[n_]);
    std::vector<int64_t> o(out_ptr_.begin(), out_ptr_.end()), i(in_ptr_.begin(), in_ptr_.end());
    for (size_t l = 0; l < from_.size(); l++)
      if (allowed.data()[l]) out_[o[from_[l]]++] = (int32_t)l, in_[i[to_[l]]++] = (int32_t)l;
  }

  // How many routes of the class are equal; 0 where there is no route.
  int64_t count_paths(int32_t src, int32_t dst, double nbytes) {
    check(src), check(dst);
    const std::vector<Label>& labels = search(src, dst);
    if (src == dst || labels.empty()) return 0;
    return count(dst, labels[best(labels, nbytes)].rate);
  }

  // The class of each message's route: its place among the routes of the pair that are best for some size.
  nb::object classes(In<int32_t> src, In<int32_t> dst, In<double> nbytes) {
    std::vector<int32_t> found(src.shape(0), 0);
    for (size_t k : by_source(src, dst)) {
      const std::vector<Label>& labels = search(src.data()[k], dst.data()[k]);
      if (labels.size() > 1) found[k] = (int32_t)best(labels, nbytes.data()[k]);
    }
    return to_numpy(std::move(found));
  }

  // How many classes of routes each pair has.
  nb::object num_classes(In<int32_t> src, In<int32_t> dst) {
    std::vector<int32_t> found(src.shape(0), 0);
    for (size_t k : by_source(src, dst)) found[k] = classes_of(src.data()[k], dst.data()[k]);
    return to_numpy(std::move(found));
  }

  nb::object routes(In<int32_t> src, In<int32_t> dst, In<int64_t> choice, In<double> nbytes) {
    std::vector<std::vector<int32_t>> found(src.shape(0));
    for (size_t k : by_source(src, dst))
      found[k] = known(src.data()[k], dst.data()[k], choice.data()[k], nbytes.data()[k]);
    std::vector<int64_t> ptr{0};
    std::vector<int32_t> links;
    for (auto& path : found) {
      links.insert(links.end(), path.begin(), path.end());
      ptr.push_back((int64_t)links.size());
    }
    return nb::make_tuple(to_numpy(std::move(ptr)), to_numpy(std::move(links)));
  }

 private:
  void check(int32_t node) const {
    if (node < 0 || node >= n_) throw nb::index_error("no such node");
  }

  std::vector<size_t> by_source(const In<int32_t>& src, const In<int32_t>& dst) const {
    std::vector<size_t> order(src.shape(0));
    for (size_t k = 0; k < order.size(); k++) order[k] = k, check(src.data()[k]), check(dst.data()[k]);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return src.data()[a] < src.data()[b]; });
    return order;
  }

  // The first label of least time: of equal times the one of fewest links, then the widest.
  static size_t best(const std::vector<Label>& labels, double nbytes) {
    if (std::isinf(nbytes)) return labels.size() - 1;
    size_t found = 0;
    for (size_t k = 1; k < labels.size(); k++) {
      double now = labels[k].time(nbytes), then = labels[found].time(nbytes);
      if (now < then || (now == then && labels[k].hops <= labels[found].hops)) found = k;
    }
    return found;
  }

  int32_t classes_of(int32_t src, int32_t dst) {
    if (num_classes_.size() >= kMemory) num_classes_.clear();
    auto [at, is_new] = num_classes_.try_emplace((int64_t)src * n_ + dst, 0);
    if (is_new) at->second = (int32_t)search(src, dst).size();
    return at->second;
  }

  // The route, from memory where it does not depend on the size: the same pairs are asked for again and again.
  std::vector<int32_t> known(int32_t src, int32_t dst, int64_t choice, double nbytes) {
    if (classes_of(src, dst) != 1) return one(src, dst, choice, nbytes);
    if (routes_.size() >= kMemory) routes_.clear();
    auto [at, is_new] = routes_.try_emplace(std::pair<int64_t, int64_t>((int64_t)src * n_ + dst, choice));
    if (is_new) at->second = one(src, dst, choice, nbytes);
    return at->second;
  }

  // The choice-th of the equal routes: walk back from the end, skipping as many routes as lie before it.
  std::vector<int32_t> one(int32_t src, int32_t dst, int64_t choice, double nbytes) {
    const std::vector<Label>& labels = search(src, dst);
    if (src == dst || labels.empty()) return {};
    double rate = labels[best(labels, nbytes)].rate;
    int64_t total = count(dst, rate), k = ((choice % total) + total) % total;
    const BestRoutes& routes = best_routes_[rate];
    std::vector<int32_t> path;
    for (int32_t v = dst; v != src; v = from_[path.back()]) {
      for (int32_t e = routes.begin[v];; e++) {
        int64_t before = routes.count[from_[routes.link[e]]];
        if (k < before) {
          path.push_back(routes.link[e]);
          break;
        }
        k -= before;
      }
    }
    std::reverse(path.begin(), path.end());
    return path;
  }

  // The label of the routes of least latency to a node over links of at least this rate.
  const Label* over(int32_t v, double rate) const {
    for (const Label& label : labels_[v])
      if (label.rate >= rate) return &label;
    return nullptr;
  }

  // Whether a link ends a best route to its end over links of at least this rate.
  bool leads(int32_t l, double rate) const {
    int32_t u = from_[l];
    if (rate_[l] < rate || (u != source_ && !forwards_[u])) return false;
    const Label *here = over(u, rate), *there = over(to_[l], rate);
    return here && there && here->ps + ps_[l] == there->ps && here->hops + 1 == there->hops;
  }

  // Find all labels of a node: of the routes that no other route beats both in latency and in rate.
  //
  // Labels leave the queue in order of latency, then links; one is kept where it is wider than those before it.
  const std::vector<Label>& search(int32_t src, int32_t dst) {
    if (src != source_) {
      for (int32_t v : touched_) labels_[v].clear();
      touched_.clear();
      best_routes_.clear();
      source_ = src;
      queue_ = {};
      queue_.push({{0, 0, std::numeric_limits<double>::infinity()}, src});
    }
    double most = std::min(widest_out_[src], widest_in_[dst]);
    while (!queue_.empty() && (labels_[dst].empty() || labels_[dst].back().rate < most)) {
      Reached next = queue_.top();
      queue_.pop();
      int32_t u = next.node;
      if (!labels_[u].empty() && labels_[u].back().rate >= next.label.rate) continue;
      if (labels_[u].empty()) touched_.push_back(u);
      labels_[u].push_back(next.label);
      if (u != src && !forwards_[u]) continue;
      for (int64_t e = out_ptr_[u]; e < out_ptr_[u + 1]; e++) {
        int32_t l = out_[e], v = to_[l];
        double rate = std::min(next.label.rate, rate_[l]);
        if (!labels_[v].empty() && labels_[v].back().rate >= rate) continue;
        queue_.push({{next.label.ps + ps_[l], next.label.hops + 1, rate}, v});
      }
    }
    return labels_[dst];
  }

  // The number of best routes from the source to a node over links of at least this rate.
  int64_t count(int32_t node, double rate) {
    BestRoutes& routes = best_routes_[rate];
    if (routes.count.empty()) {
      routes.count.assign(n_, kUnknown);
      routes.begin.assign(n_, 0);
      routes.count[source_] = 1;
    }
    std::vector<int32_t> todo{node};
    while (!todo.empty()) {
      int32_t v = todo.back();
      size_t begin = routes.link.size(), waiting = todo.size();
      int64_t total = 0;
      for (int64_t e = in_ptr_[v]; e < in_ptr_[v + 1] && routes.count[v] == kUnknown; e++) {
        if (!leads(in_[e], rate)) continue;
        int32_t u = from_[in_[e]];
        routes.link.push_back(in_[e]);
        total = std::min(kManyPaths, total + routes.count[u]);
        if (routes.count[u] == kUnknown) todo.push_back(u);
      }
      if (todo.size() > waiting) {
        routes.link.resize(begin);
        continue;
      }
      todo.pop_back();
      if (routes.count[v] == kUnknown) routes.count[v] = total, routes.begin[v] = (int32_t)begin;
    }
    return routes.count[node];
  }

  int32_t n_, source_ = -1;
  std::vector<int32_t> from_, to_;
  std::vector<double> rate_;
  std::vector<bool> forwards_;
  std::vector<double> widest_in_, widest_out_;
  std::vector<int64_t> ps_, out_ptr_, in_ptr_;
  std::vector<int32_t> out_, in_, touched_;
  std::vector<std::vector<Label>> labels_;
  std::priority_queue<Reached, std::vector<Reached>, std::greater<Reached>> queue_;
  std::map<double, BestRoutes> best_routes_;
  std::unordered_map<int64_t, int32_t> num_classes_;
  std::map<std::pair<int64_t, int64_t>, std::vector<int32_t>> routes_;
};

}  // namespace

void bind_router(nb::module_& m) {
  nb::class_<Router>(m, "Router")
      .def(nb::init<int32_t, In<int32_t>, In<int32_t>, In<double>, In<double>, In<bool>, In<bool>>(),
           nb::arg("num_nodes"), nb::arg("link_src"), nb::arg("link_dst"), nb::arg("alpha_us"), nb::arg("gb_per_s"),
           nb::arg("allowed"), nb::arg("forwards"))
      .def("count_paths", &Router::count_paths, nb::arg("src"), nb::arg("dst"), nb::arg("nbytes"))
      .def("classes", &Router::classes, nb::arg("src"), nb::arg("dst"), nb::arg("nbytes"))
      .def("num_classes", &Router::num_classes, nb::arg("src"), nb::arg("dst"))
      .def("routes", &Router::routes, nb::arg("src"), nb::arg("dst"), nb::arg("choice"), nb::arg("nbytes"));
}
}  // namespace stretto

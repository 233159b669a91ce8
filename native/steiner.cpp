// SPDX-License-Identifier: Apache-2.0
// Cheapest trees that reach some devices and may pass others: Steiner trees at given prices of links.
#include <algorithm>
#include <limits>
#include <queue>
#include <stdexcept>

#include "arrays.h"

namespace stretto {
namespace {

constexpr double kFar = std::numeric_limits<double>::infinity();
// Up to so many terminals trees are the cheapest there are (Dreyfus and Wagner); the work grows with 3 to this power.
constexpr int32_t kExact = 9;
constexpr double kTie = 1e-6;  // the relative difference below which two prices of a hop are equal

// Devices that hold data are numbered 0..n-1 in the order of `active`. A hop goes from one of them to another over nodes that
// pass on; trees branch in these devices only.
class SteinerTrees {
 public:
  SteinerTrees(int32_t num_nodes, In<int32_t> src, In<int32_t> dst, In<bool> passes, In<int32_t> active)
      : nodes_(num_nodes),
        n_((int32_t)active.shape(0)),
        src_(src.data(), src.data() + src.shape(0)),
        dst_(dst.data(), dst.data() + dst.shape(0)),
        passes_(passes.data(), passes.data() + passes.shape(0)),
        active_(active.data(), active.data() + active.shape(0)),
        begin_(num_nodes + 1, 0),
        out_(src.shape(0)),
        device_(num_nodes, -1) {
    if (dst_.size() != src_.size() || (int64_t)passes_.size() != nodes_)
      throw std::invalid_argument("SteinerTrees: arrays differ in length");
    auto inside = [&](int32_t v) { return v >= 0 && v < nodes_; };
    if (!std::all_of(src_.begin(), src_.end(), inside) || !std::all_of(dst_.begin(), dst_.end(), inside) ||
        !std::all_of(active_.begin(), active_.end(), inside))
      throw std::out_of_range("SteinerTrees: no such node");
    for (int32_t v : src_) begin_[v + 1]++;
    for (int32_t v = 0; v < nodes_; v++) begin_[v + 1] += begin_[v];
    std::vector<int64_t> at(begin_.begin(), begin_.end() - 1);
    for (size_t l = 0; l < src_.size(); l++) out_[at[src_[l]]++] = (int32_t)l;
    for (int32_t i = 0; i < n_; i++) device_[active_[i]] = i;
  }

  void set_price(In<double> price, In<double> alpha) {
    if (price.shape(0) != src_.size() || alpha.shape(0) != src_.size())
      throw std::invalid_argument("SteinerTrees: one price and one alpha for each link");
    nb::gil_scoped_release release;
    auto n = (size_t)n_;
    hop_.assign(n * n, kFar);
    late_.assign(n * n, kFar);
    path_ptr_.assign(n * n + 1, 0);
    path_.clear();
    for (int32_t i = 0; i < n_; i++) hops_from(i, price.data(), alpha.data());
    far_ = hop_;
    next_.assign(n * n, -1);
    for (size_t i = 0; i < n; i++)
      for (size_t j = 0; j < n; j++) next_[i * n + j] = (int32_t)j;
    for (size_t i = 0; i < n; i++) far_[i * n + i] = 0;
    for (size_t k = 0; k < n; k++)
      for (size_t i = 0; i < n; i++) {
        double first = far_[i * n + k];
        if (first == kFar || i == k) continue;
        for (size_t j = 0; j < n; j++)
          if (first + far_[k * n + j] < far_[i * n + j])
            far_[i * n + j] = first + far_[k * n + j], next_[i * n + j] = next_[i * n + k];
      }
  }

  // The links of all hops: hop (i, j) is row i * n + j.
  nb::object hops() const {
    return nb::make_tuple(to_numpy(std::vector<int64_t>(path_ptr_)), to_numpy(std::vector<int32_t>(path_)));
  }

  // For each root the cheapest tree to all terminals, or with `inward` from all of them to the root: its cost (infinite where
  // there is none) and its hops, so ordered that data can move along them one after the other.
  nb::object trees(In<int32_t> terminals, In<int32_t> roots, bool inward) {
    if (hop_.empty()) throw std::logic_error("SteinerTrees: set_price comes first");
    for (auto* list : {&terminals, &roots})
      for (size_t k = 0; k < list->shape(0); k++)
        if (list->data()[k] < 0 || list->data()[k] >= n_) throw std::out_of_range("SteinerTrees: no such device");
    std::vector<double> cost;
    std::vector<int64_t> ptr{0};
    std::vector<int32_t> from, to;
    {
      nb::gil_scoped_release release;
      std::vector<int32_t> wanted(terminals.data(), terminals.data() + terminals.shape(0));
      inward_ = inward;
      bool exact = (int32_t)wanted.size() <= kExact;
      if (exact) subsets(wanted);
      for (size_t k = 0; k < roots.shape(0); k++) {
        int32_t root = roots.data()[k];
        union_.clear();
        bool found = exact ? join_subsets(((int32_t)1 << wanted.size()) - 1, root, wanted) : nearest_first(root, wanted);
        cost.push_back(found ? clean(root, wanted, from, to) : kFar);
        ptr.push_back((int64_t)from.size());
      }
    }
    return nb::make_tuple(to_numpy(std::move(cost)), to_numpy(std::move(ptr)), to_numpy(std::move(from)),
                          to_numpy(std::move(to)));
  }

 private:
  using Item = std::pair<double, int32_t>;
  using Queue = std::priority_queue<Item, std::vector<Item>, std::greater<>>;

  int32_t nodes_, n_;
  std::vector<int32_t> src_, dst_;
  std::vector<uint8_t> passes_;
  std::vector<int32_t> active_;
  std::vector<int64_t> begin_;
  std::vector<int32_t> out_, device_;
  std::vector<double> hop_, late_, far_;
  std::vector<int32_t> next_;
  std::vector<int64_t> path_ptr_;
  std::vector<int32_t> path_;
  bool inward_ = false;
  std::vector<double> best_;             // by subset of terminals and device: the cheapest tree from it to them
  std::vector<int32_t> split_, branch_;  // into which subsets that tree falls, and where
  std::vector<std::pair<int32_t, int32_t>> union_;

  double far(int32_t a, int32_t b) const { return inward_ ? far_[(size_t)b * n_ + a] : far_[(size_t)a * n_ + b]; }
  double hop(int32_t a, int32_t b) const { return inward_ ? hop_[(size_t)b * n_ + a] : hop_[(size_t)a * n_ + b]; }

  double late(int32_t a, int32_t b) const { return inward_ ? late_[(size_t)b * n_ + a] : late_[(size_t)a * n_ + b]; }

  void hops_from(int32_t i, const double* price, const double* alpha) {
    std::vector<double> reach(nodes_, kFar);
    std::vector<int32_t> via(nodes_, -1);
    Queue queue;
    int32_t home = active_[i];
    reach[home] = 0;
    queue.push({0.0, home});
    while (!queue.empty()) {
      auto [d, v] = queue.top();
      queue.pop();
      if (d > reach[v] || (v != home && (device_[v] >= 0 || !passes_[v]))) continue;
      for (int64_t k = begin_[v]; k < begin_[v + 1]; k++) {
        int32_t l = out_[k], w = dst_[l];
        if (d + price[l] < reach[w]) reach[w] = d + price[l], via[w] = l, queue.push({reach[w], w});
      }
    }
    for (int32_t j = 0; j < n_; j++) {
      int32_t v = active_[j];
      if (j != i && reach[v] < kFar) {
        hop_[(size_t)i * n_ + j] = reach[v];
        auto first = (int64_t)path_.size();
        double late = 0;
        for (; v != home; v = src_[via[v]]) path_.push_back(via[v]), late += alpha[via[v]];
        late_[(size_t)i * n_ + j] = late;
        std::reverse(path_.begin() + first, path_.end());
      }
      path_ptr_[(size_t)i * n_ + j + 1] = (int64_t)path_.size();
    }
  }

  void subsets(const std::vector<int32_t>& wanted) {
    auto k = (int32_t)wanted.size();
    auto n = (size_t)n_;
    best_.assign(n << k, kFar);
    split_.assign(n << k, 0);
    branch_.assign(n << k, 0);
    std::vector<double> here(n);
    for (int32_t set = 1; set < (1 << k); set++) {
      double* best = &best_[set * n];
      if ((set & (set - 1)) == 0) {
        int32_t t = wanted[__builtin_ctz(set)];
        for (int32_t v = 0; v < n_; v++) best[v] = far(v, t);
        continue;
      }
      std::fill(here.begin(), here.end(), kFar);
      int32_t rest = set & (set - 1);
      for (int32_t part = rest; part; part = (part - 1) & rest) {
        const double *a = &best_[part * n], *b = &best_[(set ^ part) * n];
        for (size_t v = 0; v < n; v++)
          if (a[v] + b[v] < here[v]) here[v] = a[v] + b[v], split_[set * n + v] = part;
      }
      for (int32_t v = 0; v < n_; v++)
        for (int32_t u = 0; u < n_; u++)
          if (far(v, u) + here[u] < best[v]) best[v] = far(v, u) + here[u], branch_[set * n + v] = u;
    }
  }

  void add_path(int32_t a, int32_t b) {
    if (!inward_) {
      for (int32_t u = a; u != b; u = next_[(size_t)u * n_ + b]) union_.push_back({u, next_[(size_t)u * n_ + b]});
      return;
    }
    for (int32_t u = b; u != a; u = next_[(size_t)u * n_ + a]) union_.push_back({next_[(size_t)u * n_ + a], u});
  }

  bool join_subsets(int32_t set, int32_t v, const std::vector<int32_t>& wanted) {
    if (set == 0) return true;
    if (best_[(size_t)set * n_ + v] == kFar) return false;
    if ((set & (set - 1)) == 0) {
      add_path(v, wanted[__builtin_ctz(set)]);
      return true;
    }
    int32_t u = branch_[(size_t)set * n_ + v], part = split_[(size_t)set * n_ + u];
    add_path(v, u);
    return join_subsets(part, u, wanted) && join_subsets(set ^ part, u, wanted);
  }

  // For many terminals: the tree takes in the nearest one, again and again (Takahashi and Matsuyama).
  bool nearest_first(int32_t root, const std::vector<int32_t>& wanted) {
    std::vector<double> near(n_, kFar);
    std::vector<int32_t> entry(n_, root);
    std::vector<uint8_t> inside(n_, 0);
    auto take = [&](int32_t u) {
      if (inside[u]) return;
      inside[u] = 1;
      for (int32_t t : wanted)
        if (far(u, t) < near[t]) near[t] = far(u, t), entry[t] = u;
    };
    take(root);
    while (true) {
      int32_t next = -1;
      for (int32_t t : wanted)
        if (!inside[t] && (next < 0 || near[t] < near[next])) next = t;
      if (next < 0) return true;
      if (near[next] == kFar) return false;
      size_t first = union_.size();
      add_path(entry[next], next);
      for (size_t k = first; k < union_.size(); k++) take(union_[k].first), take(union_[k].second);
    }
  }

  // The hops of `union_` as a tree without anything that leads to no terminal; returns its cost. In `union_` and here a hop is
  // (nearer to the root, farther from it).
  double clean(int32_t root, const std::vector<int32_t>& wanted, std::vector<int32_t>& from, std::vector<int32_t>& to) {
    std::vector<std::vector<int32_t>> after(n_);
    for (auto [a, b] : union_) after[a].push_back(b);
    std::vector<double> reach(n_, kFar);
    std::vector<int32_t> parent(n_, -1), order;
    std::vector<uint8_t> done(n_, 0);
    Queue queue;
    reach[root] = 0;
    queue.push({0.0, root});
    while (!queue.empty()) {
      int32_t v = queue.top().second;
      queue.pop();
      if (done[v]) continue;
      done[v] = 1;
      order.push_back(v);
      for (int32_t w : after[v])
        if (!done[w] && reach[v] + hop(v, w) < reach[w]) reach[w] = reach[v] + hop(v, w), parent[w] = v, queue.push({reach[w], w});
    }
    prune(order, parent, wanted);
    flatten(order, parent);
    prune(order, parent, wanted);
    if (inward_) std::reverse(order.begin(), order.end());
    double cost = 0;
    for (int32_t v : order) {
      if (parent[v] < 0) continue;
      cost += hop(parent[v], v);
      from.push_back(inward_ ? v : parent[v]);
      to.push_back(inward_ ? parent[v] : v);
    }
    return cost;
  }

  // Devices that lead to no terminal fall off; `order` has parents before children.
  void prune(std::vector<int32_t>& order, const std::vector<int32_t>& parent, const std::vector<int32_t>& wanted) const {
    std::vector<uint8_t> needed(n_, 0);
    for (int32_t t : wanted) needed[t] = 1;
    for (auto v = order.rbegin(); v != order.rend(); v++)
      if (needed[*v] && parent[*v] >= 0) needed[parent[*v]] = 1;
    order.erase(std::remove_if(order.begin(), order.end(), [&](int32_t v) { return !needed[v]; }), order.end());
  }

  // Of trees at one price the shallower: every device of the tree hangs where it is reached soonest by a hop that costs no more.
  void flatten(const std::vector<int32_t>& order, std::vector<int32_t>& parent) const {
    std::vector<double> at(n_, 0.0);
    for (size_t k = 1; k < order.size(); k++) {
      int32_t v = order[k], best = parent[v];
      double most = hop(best, v) * (1 + kTie);
      for (size_t j = 0; j < k; j++)
        if (hop(order[j], v) <= most && at[order[j]] + late(order[j], v) < at[best] + late(best, v)) best = order[j];
      parent[v] = best;
      at[v] = at[best] + late(best, v);
    }
  }
};

}  // namespace

void bind_steiner(nb::module_& m) {
  nb::class_<SteinerTrees>(m, "SteinerTrees")
      .def(nb::init<int32_t, In<int32_t>, In<int32_t>, In<bool>, In<int32_t>>(), nb::arg("num_nodes"), nb::arg("src"),
           nb::arg("dst"), nb::arg("passes"), nb::arg("active"))
      .def("set_price", &SteinerTrees::set_price, nb::arg("price"), nb::arg("alpha"))
      .def("hops", &SteinerTrees::hops)
      .def("trees", &SteinerTrees::trees, nb::arg("terminals"), nb::arg("roots"), nb::arg("inward"));
}
}  // namespace stretto

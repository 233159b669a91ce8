// Shortest routes: fewest links first, then the widest bottleneck; equal routes are numbered.
#include <algorithm>
#include <limits>
#include <map>
#include <unordered_map>

#include "arrays.h"

namespace stretto {
namespace {

constexpr int64_t kManyPaths = int64_t(1) << 40;

class Router {
 public:
  Router(int32_t num_nodes, In<int32_t> src, In<int32_t> dst, In<double> rate, In<bool> allowed, In<bool> forwards)
      : n_(num_nodes),
        from_(src.data(), src.data() + src.shape(0)),
        to_(dst.data(), dst.data() + dst.shape(0)),
        rate_(rate.data(), rate.data() + rate.shape(0)),
        forwards_(forwards.data(), forwards.data() + forwards.shape(0)) {
    out_ptr_.assign(n_ + 1, 0);
    in_ptr_.assign(n_ + 1, 0);
    for (size_t l = 0; l < from_.size(); l++)
      if (allowed.data()[l]) out_ptr_[from_[l] + 1]++, in_ptr_[to_[l] + 1]++;
    for (int32_t v = 0; v < n_; v++) out_ptr_[v + 1] += out_ptr_[v], in_ptr_[v + 1] += in_ptr_[v];
    out_.resize(out_ptr_[n_]);
    in_.resize(in_ptr_[n_]);
    std::vector<int64_t> o(out_ptr_.begin(), out_ptr_.end()), i(in_ptr_.begin(), in_ptr_.end());
    for (size_t l = 0; l < from_.size(); l++)
      if (allowed.data()[l]) out_[o[from_[l]]++] = (int32_t)l, in_[i[to_[l]]++] = (int32_t)l;
  }

  int64_t count_paths(int32_t src, int32_t dst) {
    if (src < 0 || dst < 0 || src >= n_ || dst >= n_) throw nb::index_error("no such node");
    search(src);
    if (src == dst || hops_[dst] < 0) return 0;
    return counts(width_[dst])[dst];
  }

  nb::object routes(In<int32_t> src, In<int32_t> dst, In<int64_t> choice) {
    size_t count = src.shape(0);
    for (size_t k = 0; k < count; k++)
      if (src.data()[k] < 0 || src.data()[k] >= n_ || dst.data()[k] < 0 || dst.data()[k] >= n_)
        throw nb::index_error("no such node");
    std::vector<size_t> order(count);
    for (size_t k = 0; k < count; k++) order[k] = k;
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return src.data()[a] < src.data()[b]; });
    std::vector<std::vector<int32_t>> found(count);
    for (size_t k : order) found[k] = one(src.data()[k], dst.data()[k], choice.data()[k]);
    std::vector<int64_t> ptr{0};
    std::vector<int32_t> links;
    for (auto& path : found) {
      links.insert(links.end(), path.begin(), path.end());
      ptr.push_back((int64_t)links.size());
    }
    return nb::make_tuple(to_numpy(std::move(ptr)), to_numpy(std::move(links)));
  }

 private:
  // The choice-th of the equal routes: count paths forward, then walk back from the end.
  std::vector<int32_t> one(int32_t src, int32_t dst, int64_t choice) {
    search(src);
    if (src == dst || hops_[dst] < 0) return {};
    double width = width_[dst];
    const std::vector<int64_t>& paths = counts(width);
    int64_t k = ((choice % paths[dst]) + paths[dst]) % paths[dst];
    std::vector<int32_t> path;
    for (int32_t v = dst; v != src;) {
      for (int64_t e = in_ptr_[v]; e < in_ptr_[v + 1]; e++) {
        int32_t l = in_[e], u = from_[l];
        if (!on_dag(u, v) || rate_[l] < width) continue;
        if (k < paths[u]) {
          path.push_back(l);
          v = u;
          break;
        }
        k -= paths[u];
      }
    }
    std::reverse(path.begin(), path.end());
    return path;
  }

  bool on_dag(int32_t u, int32_t v) const {
    return hops_[u] >= 0 && hops_[u] + 1 == hops_[v] && (u == source_ || forwards_[u]);
  }

  void search(int32_t src) {
    if (src == source_) return;
    source_ = src;
    counts_.clear();
    hops_.assign(n_, -1);
    width_.assign(n_, 0);
    order_.clear();
    hops_[src] = 0;
    width_[src] = std::numeric_limits<double>::infinity();
    order_.push_back(src);
    for (size_t head = 0; head < order_.size(); head++) {
      int32_t u = order_[head];
      if (u != src && !forwards_[u]) continue;
      for (int64_t e = out_ptr_[u]; e < out_ptr_[u + 1]; e++) {
        int32_t l = out_[e], v = to_[l];
        if (hops_[v] < 0) hops_[v] = hops_[u] + 1, order_.push_back(v);
        if (hops_[v] == hops_[u] + 1) width_[v] = std::max(width_[v], std::min(width_[u], rate_[l]));
      }
    }
  }

  // Number of shortest paths from the source over links of at least this rate.
  const std::vector<int64_t>& counts(double width) {
    auto [it, fresh] = counts_.try_emplace(width);
    if (fresh) {
      it->second.assign(n_, 0);
      it->second[source_] = 1;
      for (int32_t u : order_) {
        if (!it->second[u] || (u != source_ && !forwards_[u])) continue;
        for (int64_t e = out_ptr_[u]; e < out_ptr_[u + 1]; e++) {
          int32_t v = to_[out_[e]];
          if (hops_[v] == hops_[u] + 1 && rate_[out_[e]] >= width)
            it->second[v] = std::min(kManyPaths, it->second[v] + it->second[u]);
        }
      }
    }
    return it->second;
  }

  int32_t n_, source_ = -1;
  std::vector<int32_t> from_, to_;
  std::vector<double> rate_;
  std::vector<bool> forwards_;
  std::vector<int64_t> out_ptr_, in_ptr_;
  std::vector<int32_t> out_, in_, hops_, order_;
  std::vector<double> width_;
  std::map<double, std::vector<int64_t>> counts_;
};

}  // namespace

void bind_router(nb::module_& m) {
  nb::class_<Router>(m, "Router")
      .def(nb::init<int32_t, In<int32_t>, In<int32_t>, In<double>, In<bool>, In<bool>>(), nb::arg("num_nodes"),
           nb::arg("link_src"), nb::arg("link_dst"), nb::arg("gb_per_s"), nb::arg("allowed"), nb::arg("forwards"))
      .def("count_paths", &Router::count_paths, nb::arg("src"), nb::arg("dst"))
      .def("routes", &Router::routes, nb::arg("src"), nb::arg("dst"), nb::arg("choice"));
}
}  // namespace stretto

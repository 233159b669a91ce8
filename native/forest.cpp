// SPDX-License-Identifier: Apache-2.0
// Packs spanning out-trees: grows them arc by arc, each step only as far as the rest stays packable (Edmonds, Lovasz).
#include "forest.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

#include "arrays.h"
#include "maxflow.h"

namespace stretto {
namespace {

using Set = std::vector<bool>;

// Trees that are alike so far.
struct Batch {
  Tree tree;
  std::vector<int32_t> depth;  // of each node, -1: not reached
  int32_t size = 1, slot = -1;
  std::vector<Set> tight;  // arcs into these sets are all needed by others
  bool blocked(int32_t x, int32_t y) const {
    return std::any_of(tight.begin(), tight.end(), [&](const Set& s) { return s[y] && !s[x]; });
  }
};

class Packer {
 public:
  // Nodes from `num_devices` on are switches that multicast: passing one adds nothing to a tree's height.
  Packer(Flows& graph, const std::vector<int32_t>& terminals, const int64_t* supply, int32_t max_height,
         int32_t num_devices)
      : max_height_(max_height), num_devices_(num_devices), count_((int32_t)terminals.size()),
        node_(terminals), waiting_(count_, 0), into_(count_), left_((int64_t)count_ * count_, 0),
        entry_(count_, 0) {
    for (int32_t x = 0; x < count_; x++)
      for (int32_t y = 0; y < count_; y++) {
        int32_t a = x == y ? -1 : graph.arc(node_[x], node_[y]);
        if (a < 0 || graph.capacity(a) <= 0) continue;
        left_[(int64_t)x * count_ + y] = graph.capacity(a), entry_[y] += graph.capacity(a);
        into_[y].push_back(x);
      }
    for (int32_t r = 0; r < count_; r++) {
      waiting_[r] = supply[node_[r]], total_ += waiting_[r];
      if (waiting_[r] > 0) {
        Batch b;
        b.tree = {r, waiting_[r], {}};
        b.depth.assign(count_, -1);
        b.depth[r] = 0;
        batches_.push_back(std::move(b));
      }
    }
    rebuild((int32_t)batches_.size() + 8);
  }

  bool run(std::vector<Tree>& trees) {
    std::vector<int32_t> live(batches_.size());
    std::iota(live.begin(), live.end(), 0);
    while (!live.empty()) {
      size_t at = live.size() - 1;
      // Many at once make low trees, but each of them makes every flow dearer.
      bool few = (int64_t)owner_.size() - (int64_t)free_.size() <= 2 * (int64_t)count_;
      for (size_t i = live.size(); i-- > 0;) {
        int32_t size = batches_[live[i]].size, best = batches_[live[at]].size;
        if (few ? size <= best : size >= best) at = i;
      }
      int32_t b = live[at];
      if (batches_[b].size == count_) {
        close(batches_[b]);
        trees.push_back(std::move(batches_[b].tree));
        for (auto& [x, y] : trees.back().edges) x = node_[x], y = node_[y];
        trees.back().root = node_[trees.back().root];
        live.erase(live.begin() + (int64_t)at);
        continue;
      }
      size_t before = batches_.size();
      if (!grow(b)) return false;
      if (batches_.size() > before) live.insert(live.begin() + (int64_t)at, (int32_t)before);
    }
    return true;
  }

 private:
  struct Step {
    int32_t x, y, depth;
    int64_t room;
  };

  // Arcs of the flow network: first those between terminals, then from every slot (a batch under way) to each.
  void rebuild(int32_t slots) {
    std::vector<int32_t> src, dst;
    index_.assign((int64_t)count_ * count_, -1);
    for (int32_t y = 0; y < count_; y++)
      for (int32_t x : into_[y]) {
        index_[(int64_t)x * count_ + y] = (int64_t)src.size();
        src.push_back(x), dst.push_back(y);
      }
    first_slot_arc_ = (int64_t)src.size();
    for (int32_t s = 0; s < slots; s++)
      for (int32_t v = 0; v < count_; v++) src.push_back(count_ + s), dst.push_back(v);
    flow_ = std::make_unique<MaxFlow>(count_ + slots, src.data(), dst.data(), (int64_t)src.size());
    for (int32_t y = 0; y < count_; y++)
      for (int32_t x : into_[y]) flow_->set_capacity(index_[(int64_t)x * count_ + y], left_[(int64_t)x * count_ + y]);
    free_.clear();
    owner_.resize(slots, -1);
    for (int32_t s = slots; s-- > 0;)
      if (owner_[s] < 0)
        free_.push_back(s);
      else
        for (int32_t v = 0; v < count_; v++)
          if (batches_[owner_[s]].depth[v] >= 0) join(s, v);
  }

  void join(int32_t slot, int32_t v) {
    flow_->set_capacity(first_slot_arc_ + (int64_t)slot * count_ + v, MaxFlow::kUnlimited >> 1);
  }

  void open(int32_t b) {
    if (free_.empty()) rebuild(2 * (int32_t)owner_.size());
    int32_t s = batches_[b].slot = free_.back();
    free_.pop_back();
    owner_[s] = b;
    for (int32_t v = 0; v < count_; v++)
      if (batches_[b].depth[v] >= 0) join(s, v);
  }

  void close(Batch& b) {
    total_ -= b.tree.amount;
    if (b.slot < 0) {
      waiting_[b.tree.root] -= b.tree.amount;
      return;
    }
    owner_[b.slot] = -1;
    free_.push_back(b.slot);
    for (int32_t v = 0; v < count_; v++) flow_->set_capacity(first_slot_arc_ + (int64_t)b.slot * count_ + v, 0);
  }

  // How many trees of a batch may take an arc so that everything else can still be packed.
  int64_t possible(int32_t b, int32_t x, int32_t y, int64_t want) {
    std::vector<int32_t>& from = from_;
    from.clear(), amount_.clear();
    const Batch& batch = batches_[b];
    int64_t others = total_ - batch.tree.amount;
    for (int32_t r = 0; r < count_; r++) {
      int64_t here = waiting_[r] - (batch.slot < 0 && batch.tree.root == r ? batch.tree.amount : 0);
      if (here > 0) from.push_back(r), amount_.push_back(here);
    }
    for (size_t s = 0; s < owner_.size(); s++)
      if (owner_[s] >= 0 && owner_[s] != b)
        from.push_back(count_ + (int32_t)s), amount_.push_back(batches_[owner_[s]].tree.amount);
    int64_t need = others + want;
    from.push_back(x), amount_.push_back(need);
    int64_t got = flow_->run(from.data(), amount_.data(), (int64_t)from.size(), &y, &need, 1);
    return got - others;
  }

  bool grow(int32_t b) {
    std::vector<Step> steps;
    {
      const Batch& batch = batches_[b];
      for (int32_t y = 0; y < count_; y++) {
        if (batch.depth[y] >= 0) continue;
        for (int32_t x : into_[y]) {
          int64_t room = std::min(left_[(int64_t)x * count_ + y], batch.tree.amount);
          if (batch.depth[x] < 0 || room <= 0 || batch.depth[x] + rise(y) > max_height_) continue;
          steps.push_back({x, y, batch.depth[x], room});
        }
      }
    }
    int32_t root = batches_[b].tree.root;
    std::sort(steps.begin(), steps.end(), [&](const Step& p, const Step& q) {
      if (p.depth != q.depth) return p.depth < q.depth;
      if (p.room != q.room) return p.room > q.room;
      if (entry_[p.y] != entry_[q.y]) return entry_[p.y] < entry_[q.y];
      int64_t pl = left_[(int64_t)p.x * count_ + p.y], ql = left_[(int64_t)q.x * count_ + q.y];
      if (pl != ql) return pl > ql;
      int32_t py = (p.y - root + count_) % count_, qy = (q.y - root + count_) % count_;
      return py != qy ? py < qy : p.x < q.x;
    });
    Step best{-1, -1, -1, 0};
    for (const Step& s : steps) {
      if (best.room > 0 && (s.depth > best.depth || s.room <= best.room)) break;
      if (batches_[b].blocked(s.x, s.y)) continue;
      int64_t can = possible(b, s.x, s.y, s.room);
      if (can < s.room) {
        Set side = flow_->sink_side();
        side.resize(count_);
        if (can == 0) batches_[b].tight.push_back(std::move(side));
      }
      if (can > best.room) best = {s.x, s.y, s.depth, can};
      if (best.room == batches_[b].tree.amount) break;
    }
    if (best.room <= 0) return false;
    take(b, best);
    return true;
  }

  void take(int32_t b, const Step& s) {
    if (s.room < batches_[b].tree.amount) {  // the others go another way
      batches_.push_back(batches_[b]);
      Batch& rest = batches_.back();
      rest.tree.amount -= s.room, rest.slot = -1;
      batches_[b].tree.amount = s.room;
      if (rest.size > 1) open((int32_t)batches_.size() - 1);
    }
    Batch& batch = batches_[b];
    int64_t& left = left_[(int64_t)s.x * count_ + s.y];
    left -= s.room;
    entry_[s.y] -= s.room;
    flow_->set_capacity(index_[(int64_t)s.x * count_ + s.y], left);
    batch.depth[s.y] = batch.depth[s.x] + rise(s.y);
    batch.tree.edges.push_back({s.x, s.y});
    if (++batch.size == 2) {
      waiting_[batch.tree.root] -= batch.tree.amount;
      open(b);
    } else {
      join(batch.slot, s.y);
    }
  }

  int32_t rise(int32_t y) const { return node_[y] < num_devices_; }

  int32_t max_height_, num_devices_, count_;
  std::vector<int32_t> node_;
  std::vector<int64_t> waiting_;  // at each root: trees of which nothing is known yet
  std::vector<std::vector<int32_t>> into_;
  std::vector<int64_t> left_, entry_, index_;  // of arcs; all those into a node; of arcs, in the flow network
  int64_t total_ = 0, first_slot_arc_ = 0;
  std::vector<Batch> batches_;
  std::unique_ptr<MaxFlow> flow_;
  std::vector<int32_t> owner_, free_, from_;
  std::vector<int64_t> amount_;
};

// Gives each arc of each tree a route, and divides trees where routes differ.
struct Routed {
  std::vector<int32_t> root, src, dst, route;
  std::vector<int64_t> amount, ptr{0};

  Routed(Flows& graph, const std::vector<Tree>& trees) {
    for (const Tree& tree : trees)
      for (int64_t left = tree.amount; left > 0;) {
        int64_t part = left;
        std::vector<std::pair<int32_t, int64_t>*> widest;
        for (auto [x, y] : tree.edges) {
          Shares& shares = graph.shares(graph.arc(x, y));
          widest.push_back(&*std::max_element(shares.begin(), shares.end(),
                                              [](auto& p, auto& q) { return p.second < q.second; }));
          part = std::min(part, widest.back()->second);
        }
        for (size_t i = 0; i < widest.size(); i++) {
          src.push_back(tree.edges[i].first), dst.push_back(tree.edges[i].second), route.push_back(widest[i]->first);
          widest[i]->second -= part;
        }
        root.push_back(tree.root), amount.push_back(part), ptr.push_back((int64_t)src.size());
        left -= part;
      }
  }
};

enum Status { kDone, kStarved, kUnbalanced, kTooHigh };

nb::object pack_forest(int32_t num_nodes, In<int32_t> src, In<int32_t> dst, In<int64_t> capacity, In<int32_t> terminals,
                       In<int64_t> supply, int32_t max_height, int32_t num_devices) {
  Status status = kDone;
  int32_t where = -1;
  std::vector<Tree> trees;
  std::vector<int32_t> root, tree_src, tree_dst, route, links;
  std::vector<int64_t> amount, ptr, link_ptr{0};
  {
    nb::gil_scoped_release release;
    std::vector<int32_t> ends(terminals.data(), terminals.data() + terminals.shape(0));
    Flows graph(num_nodes, src.data(), dst.data(), capacity.data(), (int64_t)src.shape(0), ends, supply.data());
    if ((where = graph.starved()) >= 0) status = kStarved;
    std::vector<bool> keep(num_nodes, false);
    for (int32_t t : ends) keep[t] = true;
    std::vector<int32_t> others;
    for (int32_t v = 0; v < num_nodes; v++)
      if (!keep[v]) others.push_back(v);
    std::stable_sort(others.begin(), others.end(),
                     [&](int32_t a, int32_t b) { return graph.degree(a) < graph.degree(b); });
    for (int32_t w : others)
      if (status == kDone && !graph.remove_node(w)) status = kUnbalanced, where = w;
    if (status == kDone) {
      Packer packer(graph, ends, supply.data(), max_height, num_devices);
      if (!packer.run(trees)) status = kTooHigh;
    }
    if (status == kDone) {
      Routed routed(graph, trees);
      root = std::move(routed.root), tree_src = std::move(routed.src), tree_dst = std::move(routed.dst);
      route = std::move(routed.route), amount = std::move(routed.amount), ptr = std::move(routed.ptr);
      for (const Route& r : graph.routes()) {
        links.insert(links.end(), r.begin(), r.end());
        link_ptr.push_back((int64_t)links.size());
      }
    }
  }
  return nb::make_tuple((int)status, where, to_numpy(std::move(root)), to_numpy(std::move(amount)),
                        to_numpy(std::move(ptr)), to_numpy(std::move(tree_src)), to_numpy(std::move(tree_dst)),
                        to_numpy(std::move(route)), to_numpy(std::move(link_ptr)), to_numpy(std::move(links)));
}

}  // namespace

void bind_forest(nb::module_& m) {
  m.def("pack_forest", &pack_forest, nb::arg("num_nodes"), nb::arg("src"), nb::arg("dst"), nb::arg("capacity"),
        nb::arg("terminals"), nb::arg("supply"), nb::arg("max_height"), nb::arg("num_devices"));
}
}  // namespace stretto

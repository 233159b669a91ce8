// SPDX-License-Identifier: Apache-2.0
// Replaces switches by direct arcs without narrowing any terminal's supply (edge splitting).
#include <algorithm>
#include <limits>

#include "forest.h"

namespace stretto {

Flows::Flows(int32_t num_nodes, const int32_t* src, const int32_t* dst, const int64_t* capacity, int64_t num_links,
             std::vector<int32_t> terminals, const int64_t* supply)
    : n_(num_nodes + 1), table_((int64_t)n_ * n_, -1), ends_(n_), terminals_(std::move(terminals)), via_(n_), far_(n_),
      stamp_(n_, 0) {
  for (int64_t e = 0; e < num_links; e++) {
    if (capacity[e] <= 0) continue;
    int32_t a = add_arc(src[e], dst[e]);
    capacity_[a] += capacity[e];
    shares_[a].push_back({intern({(int32_t)e}), capacity[e]});
  }
  int32_t source = num_nodes;
  int64_t total = 0;
  for (int32_t v = 0; v < num_nodes; v++)
    if (supply[v] > 0) capacity_[add_arc(source, v)] = supply[v], total += supply[v];
  for (int32_t t : terminals_) {
    flow_.emplace_back(capacity_.size(), 0);
    order_.push_back((int32_t)order_.size());
    if (starved_ < 0 && reroute(flow_.back(), source, t, total) < total) starved_ = t;
  }
}

int32_t Flows::add_arc(int32_t u, int32_t v) {
  int32_t& a = table_[(int64_t)u * n_ + v];
  if (a < 0) {
    a = (int32_t)tail_.size();
    tail_.push_back(u), head_.push_back(v), capacity_.push_back(0), shares_.emplace_back();
    ends_[u].push_back(2 * a), ends_[v].push_back(2 * a + 1);
    for (auto& flow : flow_) flow.push_back(0);
  }
  return a;
}

int32_t Flows::intern(Route route) {
  auto [at, fresh] = number_.try_emplace(std::move(route), (int32_t)routes_.size());
  if (fresh) routes_.push_back(at->first);
  return at->second;
}

// Shortest augmenting paths; what cannot be carried is left.
int64_t Flows::reroute(std::vector<int64_t>& flow, int32_t from, int32_t to, int64_t amount) {
  int64_t done = 0;
  while (done < amount) {
    clock_++;
    queue_.assign(1, from);
    stamp_[from] = clock_;
    for (size_t i = 0; i < queue_.size() && stamp_[to] != clock_; i++)
      for (int32_t end : ends_[queue_[i]]) {
        int32_t a = end >> 1, w = end & 1 ? tail_[a] : head_[a];
        if (stamp_[w] == clock_ || (end & 1 ? flow[a] : capacity_[a] - flow[a]) <= 0) continue;
        stamp_[w] = clock_, via_[w] = end;
        queue_.push_back(w);
        if (w == to) break;
      }
    if (stamp_[to] != clock_) break;
    int64_t most = amount - done;
    auto walk = [&](auto&& visit) {
      for (int32_t v = to; v != from;) {
        int32_t end = via_[v], a = end >> 1;
        visit(a, end & 1);
        v = end & 1 ? head_[a] : tail_[a];
      }
    };
    walk([&](int32_t a, bool back) { most = std::min(most, back ? flow[a] : capacity_[a] - flow[a]); });
    walk([&](int32_t a, bool back) { flow[a] += back ? -most : most; });
    done += most;
  }
  return done;
}

// Brings a flow within the capacities of a, b and the arc that stands for both; returns what does not fit.
int64_t Flows::repair(std::vector<int64_t>& flow, int32_t a, int32_t b, int32_t direct) {
  if (b >= 0) {
    int64_t back = direct >= 0 ? std::max<int64_t>(0, excess(flow, direct)) : 0;
    if (back) flow[direct] -= back, flow[a] += back, flow[b] += back;
    int64_t move = std::min({std::max(excess(flow, a), excess(flow, b)), flow[a], flow[b]});
    if (direct >= 0) move = std::min(move, capacity_[direct] - flow[direct]);
    if (move > 0) {
      flow[a] -= move, flow[b] -= move;
      if (direct >= 0) flow[direct] += move;
    }
  }
  for (int32_t x : {a, b}) {
    if (x < 0 || excess(flow, x) <= 0) continue;
    int64_t want = excess(flow, x), done = reroute(flow, tail_[x], head_[x], want);
    flow[x] -= done;
    if (done < want) return want - done;
  }
  return 0;
}

// Takes as much capacity as possible, up to `amount`, from a (and b, in favour of `direct`). Returns how much.
int64_t Flows::shrink(int32_t a, int32_t b, int32_t direct, int64_t amount) {
  auto change = [&](int64_t by) {
    capacity_[a] -= by;
    if (b >= 0) capacity_[b] -= by;
    if (direct >= 0) capacity_[direct] += by;
  };
  change(amount);
  for (size_t i = 0; i < order_.size() && amount > 0; i++) {
    std::vector<int64_t>& flow = flow_[order_[i]];
    while (int64_t missing = repair(flow, a, b, direct)) {
      missing = std::min(missing, amount);
      change(-missing), amount -= missing;
      for (size_t j = 0; j < i; j++) repair(flow_[order_[j]], a, b, direct);
      if (amount == 0) {
        repair(flow, a, b, direct);
        std::rotate(order_.begin(), order_.begin() + (int64_t)i, order_.begin() + (int64_t)i + 1);
        break;
      }
    }
  }
  return amount;
}

Shares Flows::take(int32_t a, int64_t amount) {
  Shares taken;
  while (amount > 0) {
    auto& [route, left] = shares_[a].back();
    int64_t part = std::min(left, amount);
    taken.push_back({route, part});
    amount -= part, left -= part;
    if (left == 0) shares_[a].pop_back();
  }
  return taken;
}

int64_t Flows::drop(int32_t a, int64_t amount) {
  int64_t dropped = shrink(a, -1, -1, std::min(amount, capacity_[a]));
  take(a, dropped);
  return dropped;
}

// a = u>w and b = w>t become u>t.
void Flows::split(int32_t a, int32_t b, int64_t amount) {
  int32_t u = tail_[a], t = head_[b], direct = u == t ? -1 : add_arc(u, t);
  amount = shrink(a, b, direct, amount);
  if (!amount) return;
  Shares first = take(a, amount), second = take(b, amount);
  for (size_t i = 0, j = 0; i < first.size();) {
    int64_t part = std::min(first[i].second, second[j].second);
    if (direct >= 0) {
      Route route = routes_[first[i].first];
      const Route& rest = routes_[second[j].first];
      route.insert(route.end(), rest.begin(), rest.end());
      Shares& shares = shares_[direct];
      int32_t number = intern(std::move(route));
      auto same = std::find_if(shares.begin(), shares.end(), [&](auto& s) { return s.first == number; });
      if (same == shares.end())
        shares.push_back({number, part});
      else
        same->second += part;
    }
    if (!(first[i].second -= part)) i++;
    if (!(second[j].second -= part)) j++;
  }
}

void Flows::distances(int32_t from, int32_t without) {
  constexpr int32_t kFar = std::numeric_limits<int32_t>::max();
  std::fill(far_.begin(), far_.end(), kFar);
  far_[from] = 0;
  queue_.assign(1, from);
  for (size_t i = 0; i < queue_.size(); i++)
    for (int32_t end : ends_[queue_[i]]) {
      int32_t a = end >> 1, w = head_[a];
      if (end & 1 || w == without || capacity_[a] <= 0 || far_[w] != kFar) continue;
      far_[w] = far_[queue_[i]] + 1;
      queue_.push_back(w);
    }
}

// What a node takes in beyond what it gives out (or the reverse) is of no use.
void Flows::trim(int32_t w, bool inward, int64_t surplus) {
  for (size_t i = 0; i < ends_[w].size() && surplus > 0; i++)
    if ((ends_[w][i] & 1) == inward) surplus -= drop(ends_[w][i] >> 1, surplus);
}

// Each neighbour in turn is joined to the one that is farthest from it by other ways, a fair share at a time: this
// gives many thin arcs that reach far, and so low trees.
bool Flows::remove_node(int32_t w) {
  std::vector<int32_t> in, out;
  int64_t balance = 0, total = 0;
  for (int32_t end : ends_[w]) {
    if (capacity_[end >> 1] <= 0) continue;
    (end & 1 ? in : out).push_back(end >> 1);
    (end & 1 ? balance : total) += capacity_[end >> 1];
  }
  balance -= total;
  if (balance) trim(w, balance > 0, std::abs(balance));
  for (int pass = 0; pass < 3; pass++) {
    std::vector<std::vector<bool>> tried(in.size(), std::vector<bool>(out.size(), false));
    for (bool any = true; any;) {
      any = false;
      for (size_t i = 0; i < in.size(); i++) {
        int32_t a = in[i], u = tail_[a];
        if (capacity_[a] <= 0) continue;
        distances(u, w);
        int64_t best = -1;
        for (size_t step = 0; step < out.size(); step++) {
          size_t j = (i + step) % out.size();
          int32_t b = out[j];
          if (tried[i][j] || capacity_[b] <= 0 || (head_[b] == u) != (pass == 2)) continue;
          if (best < 0 || far_[head_[b]] > far_[head_[out[best]]]) best = (int64_t)j;
        }
        if (best < 0) continue;
        tried[i][best] = true, any = true;
        int32_t b = out[best];
        int64_t most = std::min(capacity_[a], capacity_[b]);
        int64_t fair = std::max<int64_t>(1, capacity_[a] / std::max<int64_t>(1, (int64_t)out.size() - 1));
        split(a, b, pass == 0 ? std::min(most, fair) : most);
      }
    }
  }
  for (const auto& side : {in, out})
    for (int32_t a : side)
      if (capacity_[a] > 0 && (drop(a, capacity_[a]), capacity_[a] > 0)) return false;
  for (int32_t end : ends_[w]) {
    int32_t other = end & 1 ? tail_[end >> 1] : head_[end >> 1];
    std::erase(ends_[other], end ^ 1);
  }
  ends_[w].clear();
  return true;
}
}  // namespace stretto

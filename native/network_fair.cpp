// SPDX-License-Identifier: Apache-2.0
// Contention `fair`: transfers that share a link get max-min fair rates, as TCP and RoCE aim for.
//
// A transfer is one flow over all links of its route, and flows once the one before it on its connection has drained:
// connections share, their messages queue. When flows come or go, only the part of the network that is connected to them
// through shared links is computed anew (progressive filling). A link may cap one flow's rate, and lose throughput when
// many flows meet in it (incast).
//
// The members of a multicast are flows of their own, but a link that they share carries them as one strand, at the rate
// of the fastest; once that one is through, the link has carried everything, and the others live on what lies behind.
// They start together, when the connections of all of them are free.
#include "network.h"

namespace stretto {
namespace {

class Fair : public Driver<Fair> {
 public:
  Fair(const Transfers& t, const Network& net, int64_t num_links)
      : Driver(t, net, num_links, [](int32_t) { return 1; }), flows_on_(num_links), rate_(t.count, kIdle),
        left_(t.count, 0), since_(t.count, 0), strands_(casts_.any() ? t.count : 0), turn_left_(t.count, 1),
        version_(t.count, 0), marked_link_(num_links, 0), marked_flow_(t.count, 0), room_(num_links), open_(num_links) {
    for (int32_t x = 0; x < t.count; x++)
      if (int32_t next = has_links(x) ? next_message(x) : kNobody; next != kNobody) turn_left_[casts_.leader(next)]++;
    for (int32_t x = 0; x < (int32_t)strands_.size(); x++)
      if (casts_.size(casts_.leader(x)) > 1) strands_[x].resize(net.routes.size(t.route[x]));
    for (int32_t x = 0; x < t.count; x++)
      if (auto r = (size_t)t.route[x]; r >= route_cap_.size()) route_cap_.resize(r + 1, -1);
    for (int32_t x = 0; x < t.count; x++)
      if (double& least = route_cap_[t.route[x]]; least < 0) {
        least = std::numeric_limits<double>::infinity();
        for (const int32_t* l = net.routes.begin(t.route[x]); l != net.routes.end(t.route[x]); l++)
          least = std::min(least, net.flow_cap[*l]);
      }
    simulate();
  }

  void begin(int32_t first, double now) {
    if (--turn_left_[first] == 0) start(first, now);
  }

  void handle(const Event& e) {
    int32_t x = e.transfer;
    switch (e.kind) {
      case kHop: return join(x, e.time);
      case kArrive: return arrived(x, stage(x, 0), e.time);
      case kFinish: return finish(x, e.time);
      default: break;
    }
    if (e.kind - kDrain != version_[x]) return;  // its rate has changed since
    leave(x, e.time);
    read_done(x);
    if (int32_t next = next_message(x); next != kNobody) {
      int32_t first = casts_.leader(next);
      if (--turn_left_[first] == 0) {
        blame(stage(first, 0), stage(x, 0));
        start(first, e.time);
      }
    }
    double delay = net_.alpha_blocks ? 0 : latency(x);
    if (delay > 0)
      queue_.push({e.time + delay, x, kArrive});
    else
      arrived(x, stage(x, 0), e.time);
  }

  void settle(double now) {
    if (changed_.empty()) return;
    collect();
    if (records_load())
      for (int32_t l : links_)
        for (int32_t owner : flows_on_[l]) record_flow(l, owner, now);
    for (int32_t x : flows_) {
      left_[x] = std::max(0.0, left_[x] - rate_[x] * (now - since_[x]));
      since_[x] = now;
    }
    old_rate_.clear();
    for (int32_t x : flows_) old_rate_.push_back(rate_[x]);
    fill();
    for (size_t i = 0; i < flows_.size(); i++) {
      int32_t x = flows_[i];
      if (rate_[x] == old_rate_[i]) continue;  // its end is still as foretold
      version_[x] = (version_[x] + 1) & 0x3fffffff;
      queue_.push({now + left_[x] / rate_[x], x, kDrain + version_[x]});
    }
    changed_.clear();
  }

 private:
  void start(int32_t first, double now) {
    casts_.each_member(first, [&](int32_t x) {
      run.start[x] = now;
      if (net_.alpha_blocks && latency(x) > 0)
        queue_.push({now + latency(x), x, kHop});
      else
        join(x, now);
    });
  }

  enum State : int8_t { kAhead, kFlowing, kThrough };
  struct Strand {  // what a link carries for one member, or for several
    State state = kAhead;
    int32_t open = 0;  // members whose rate is not fixed yet
  };

  // Every link of a flow that has still something to carry for it; with the strand, if it is multicast.
  template <class Visit>
  void each_link(int32_t x, Visit&& visit) const {
    const int32_t* route = net_.routes.begin(t_.route[x]);
    auto hops = (int32_t)net_.routes.size(t_.route[x]);
    for (int32_t hop = 0; hop < hops; hop++) {
      int32_t owner = casts_.owner(x, hop);
      Strand* strand = strands_.empty() || strands_[owner].empty() ? nullptr : &strands_[owner][hop];
      if (!strand || strand->state != kThrough) visit(route[hop], owner, strand);
    }
  }

  // The flows that a link carries as one.
  template <class Visit>
  void each_flow(int32_t link, int32_t owner, Visit&& visit) const {
    if (strands_.empty() || strands_[owner].empty()) return visit(owner);
    const int32_t* route = net_.routes.begin(t_.route[owner]);
    auto hop = (int32_t)(std::find(route + casts_.parts(owner), net_.routes.end(t_.route[owner]), link) - route);
    casts_.each_together(owner, hop, [&](int32_t m) {
      if (rate_[m] != kIdle) visit(m);
    });
  }

  double latency(int32_t x) const {
    double total = 0;
    for (const int32_t* l = net_.routes.begin(t_.route[x]); l != net_.routes.end(t_.route[x]); l++) total += net_.alpha[*l];
    return total;
  }

  void join(int32_t x, double now) {
    left_[x] = t_.bytes[x];
    since_[x] = now;
    rate_[x] = 0;
    each_link(x, [&](int32_t l, int32_t owner, Strand* strand) {
      changed_.push_back(l);
      if (strand && strand->state == kFlowing) return;
      if (strand) strand->state = kFlowing;
      flows_on_[l].push_back(owner);
      run.link_busy[l] += t_.bytes[x] / net_.rate[l], run.link_bytes[l] += t_.bytes[x];
    });
  }

  // What a link has carried of a flow, or of a strand, since their rates last changed.
  void record_flow(int32_t link, int32_t owner, double now) {
    double rate = 0, since = now;
    each_flow(link, owner, [&](int32_t x) {
      if (rate_[x] > rate) rate = rate_[x], since = since_[x];
    });
    if (rate > 0) record_load(link, since, now, rate / net_.rate[link]);
  }

  void leave(int32_t x, double now) {
    if (records_load()) each_link(x, [&](int32_t l, int32_t owner, Strand*) { record_flow(l, owner, now); });
    rate_[x] = kIdle;
    each_link(x, [&](int32_t l, int32_t owner, Strand* strand) {
      auto& flows = flows_on_[l];
      flows.erase(std::find(flows.begin(), flows.end(), owner));
      changed_.push_back(l);
      if (strand) strand->state = kThrough;
    });
  }

  // All links and flows connected to what changed.
  void collect() {
    stamp_++;
    links_.clear(), flows_.clear();
    auto add_link = [&](int32_t l) {
      if (marked_link_[l] != stamp_) marked_link_[l] = stamp_, links_.push_back(l);
    };
    auto add_flow = [&](int32_t x) {
      if (marked_flow_[x] == stamp_) return;
      marked_flow_[x] = stamp_;
      flows_.push_back(x);
      each_link(x, [&](int32_t l, int32_t, Strand*) { add_link(l); });
    };
    for (int32_t l : changed_) add_link(l);
    for (size_t head = 0; head < links_.size(); head++)
      for (int32_t owner : flows_on_[links_[head]]) each_flow(links_[head], owner, add_flow);
    std::sort(flows_.begin(), flows_.end());
  }

  double capacity(int32_t link) const {
    int32_t curve = net_.incast[link];
    double share = 1;
    if (curve >= 0)
      for (int64_t i = net_.curve_flows.ptr[curve]; i < net_.curve_flows.ptr[curve + 1]; i++)
        if (net_.curve_flows.values[i] <= (int32_t)flows_on_[link].size()) share = net_.curve_share[i];
    return net_.rate[link] * share;
  }

  double cap(int32_t x) const {
    if (strands_.empty()) return route_cap_[t_.route[x]];
    double least = std::numeric_limits<double>::infinity();
    each_link(x, [&](int32_t l, int32_t, const Strand*) { least = std::min(least, net_.flow_cap[l]); });
    return least;
  }

  // Progressive filling: the tightest link (or flow cap) fixes its flows' rates, then the next. What a link has for each
  // of its open flows never shrinks meanwhile, so its place among the levels is brought up to date only when it comes up.
  void fill() {
    levels_.clear();
    for (int32_t l : links_) {
      room_[l] = capacity(l), open_[l] = (int32_t)flows_on_[l].size();
      if (open_[l]) levels_.push_back({room_[l] / open_[l], l});
    }
    capped_.clear();
    for (int32_t x : flows_) {
      rate_[x] = kOpen;
      if (!strands_.empty()) each_link(x, [](int32_t, int32_t, Strand* strand) { if (strand) strand->open++; });
      if (double c = cap(x); std::isfinite(c)) capped_.push_back({c, x});
    }
    std::make_heap(levels_.begin(), levels_.end(), std::greater<Level>());
    if (!std::is_sorted(capped_.begin(), capped_.end())) std::sort(capped_.begin(), capped_.end());
    // A strand takes as much as the last of its flows to be fixed, which is the fastest.
    auto fix = [&](int32_t x, double rate) {
      rate_[x] = rate;
      each_link(x, [&](int32_t l, int32_t, Strand* strand) {
        if (strand && --strand->open > 0) return;
        room_[l] = std::max(0.0, room_[l] - rate);
        open_[l]--;
      });
    };
    size_t next = 0;  // of those with a cap of their own
    while (!levels_.empty()) {
      auto [level, link] = levels_.front();
      for (; next < capped_.size() && capped_[next].first <= level; next++)
        if (int32_t x = capped_[next].second; rate_[x] == kOpen) fix(x, capped_[next].first);
      std::pop_heap(levels_.begin(), levels_.end(), std::greater<Level>());
      double now = open_[link] > 0 ? room_[link] / open_[link] : 0;
      if (now > level) {
        levels_.back().first = now;
        std::push_heap(levels_.begin(), levels_.end(), std::greater<Level>());
        continue;
      }
      levels_.pop_back();
      if (open_[link] > 0)
        for (int32_t owner : flows_on_[link])
          each_flow(link, owner, [&](int32_t x) {
            if (rate_[x] == kOpen) fix(x, now);
          });
    }
  }

  using Level = std::pair<double, int32_t>;  // rate; link or flow
  static constexpr double kOpen = -1, kIdle = -2;  // in place of a rate: not fixed yet; not under way

  std::vector<std::vector<int32_t>> flows_on_;
  std::vector<double> rate_, old_rate_, left_, since_;
  mutable std::vector<std::vector<Strand>> strands_;  // of each member of a multicast, one for each hop it owns
  std::vector<int32_t> turn_left_;  // what a message still waits for: its dependencies, and the ones before it to drain
  std::vector<int32_t> version_, marked_link_, marked_flow_;
  std::vector<double> room_, route_cap_;
  std::vector<Level> levels_, capped_;
  std::vector<int32_t> open_, changed_, links_, flows_;
  int32_t stamp_ = 0;
};

}  // namespace

Run simulate_fair(const Transfers& t, const Network& net, int64_t num_links) {
  return std::move(Fair(t, net, num_links).run);
}
}  // namespace stretto

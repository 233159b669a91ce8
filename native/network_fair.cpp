// Contention `fair`: transfers that share a link get max-min fair rates, as TCP and RoCE aim for.
//
// A transfer is one flow over all links of its route. When flows come or go, only the part of the network that is
// connected to them through shared links is computed anew (progressive filling). A link may cap one flow's rate, and
// lose throughput when many flows meet in it (incast).
#include "network.h"

namespace stretto {
namespace {

class Fair : public Driver<Fair> {
 public:
  Fair(const Transfers& t, const Network& net, int64_t num_links)
      : Driver(t, net, num_links, [](int32_t) { return 1; }), flows_on_(num_links), rate_(t.count, 0), left_(t.count, 0), since_(t.count, 0),
        version_(t.count, 0), marked_link_(num_links, 0), marked_flow_(t.count, 0), room_(num_links), open_(num_links) {
    simulate();
  }

  void begin(int32_t x, double now) {
    run.start[x] = now;
    if (net_.alpha_blocks && latency(x) > 0)
      queue_.push({now + latency(x), x, kHop});
    else
      join(x, now);
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
    leave(x);
    read_done(x);
    double delay = net_.alpha_blocks ? 0 : latency(x);
    if (delay > 0)
      queue_.push({e.time + delay, x, kArrive});
    else
      arrived(x, stage(x, 0), e.time);
  }

  void settle(double now) {
    if (changed_.empty()) return;
    collect();
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
  double latency(int32_t x) const {
    double total = 0;
    for (const int32_t* l = net_.routes.begin(t_.route[x]); l != net_.routes.end(t_.route[x]); l++) total += net_.alpha[*l];
    return total;
  }

  void join(int32_t x, double now) {
    left_[x] = t_.bytes[x];
    since_[x] = now;
    for (const int32_t* l = net_.routes.begin(t_.route[x]); l != net_.routes.end(t_.route[x]); l++) {
      flows_on_[*l].push_back(x);
      changed_.push_back(*l);
      run.link_busy[*l] += t_.bytes[x] / net_.rate[*l], run.link_bytes[*l] += t_.bytes[x];
    }
  }

  void leave(int32_t x) {
    rate_[x] = 0;
    for (const int32_t* l = net_.routes.begin(t_.route[x]); l != net_.routes.end(t_.route[x]); l++) {
      auto& flows = flows_on_[*l];
      flows.erase(std::find(flows.begin(), flows.end(), x));
      changed_.push_back(*l);
    }
  }

  // All links and flows connected to what changed.
  void collect() {
    stamp_++;
    links_.clear(), flows_.clear();
    auto add_link = [&](int32_t l) {
      if (marked_link_[l] != stamp_) marked_link_[l] = stamp_, links_.push_back(l);
    };
    for (int32_t l : changed_) add_link(l);
    for (size_t head = 0; head < links_.size(); head++)
      for (int32_t x : flows_on_[links_[head]])
        if (marked_flow_[x] != stamp_) {
          marked_flow_[x] = stamp_;
          flows_.push_back(x);
          for (const int32_t* l = net_.routes.begin(t_.route[x]); l != net_.routes.end(t_.route[x]); l++) add_link(*l);
        }
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
    double least = std::numeric_limits<double>::infinity();
    for (const int32_t* l = net_.routes.begin(t_.route[x]); l != net_.routes.end(t_.route[x]); l++)
      least = std::min(least, net_.flow_cap[*l]);
    return least;
  }

  // Progressive filling: the tightest link (or flow cap) fixes its flows' rates, then the next.
  void fill() {
    using Level = std::pair<double, int32_t>;  // rate; link, or ~flow for a capped flow
    std::priority_queue<Level, std::vector<Level>, std::greater<Level>> levels;
    for (int32_t l : links_) {
      room_[l] = capacity(l), open_[l] = (int32_t)flows_on_[l].size();
      if (open_[l]) levels.push({room_[l] / open_[l], l});
    }
    for (int32_t x : flows_) {
      rate_[x] = -1;
      if (double c = cap(x); std::isfinite(c)) levels.push({c, ~x});
    }
    auto fix = [&](int32_t x, double rate) {
      rate_[x] = rate;
      for (const int32_t* l = net_.routes.begin(t_.route[x]); l != net_.routes.end(t_.route[x]); l++) {
        room_[*l] = std::max(0.0, room_[*l] - rate);
        if (--open_[*l] > 0) levels.push({room_[*l] / open_[*l], *l});
      }
    };
    while (!levels.empty()) {
      auto [level, who] = levels.top();
      levels.pop();
      if (who < 0) {
        if (rate_[~who] < 0) fix(~who, level);
      } else if (open_[who] > 0 && level == room_[who] / open_[who]) {
        for (int32_t x : flows_on_[who])
          if (rate_[x] < 0) fix(x, level);
      }
    }
  }

  std::vector<std::vector<int32_t>> flows_on_;
  std::vector<double> rate_, old_rate_, left_, since_;
  std::vector<int32_t> version_, marked_link_, marked_flow_;
  std::vector<double> room_;
  std::vector<int32_t> open_, changed_, links_, flows_;
  int32_t stamp_ = 0;
};

}  // namespace

Run simulate_fair(const Transfers& t, const Network& net, int64_t num_links) {
  return std::move(Fair(t, net, num_links).run);
}
}  // namespace stretto

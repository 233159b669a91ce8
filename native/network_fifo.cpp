// SPDX-License-Identifier: Apache-2.0
// Contention `fifo`: a link serves one transfer at a time, in order of request.
//
// A message is cut through: it asks for the next link when its head gets there, and its tail follows no sooner than it
// came in. So each link is busy for exactly bytes/rate (plus alpha where that blocks), and a lone transfer takes
// sum(alpha) + bytes/slowest. Requests reach a link in time order, so its queue is just the time it is free again.
// What is multicast is served once on the links that its members share; where they part, each asks for its own link.
#include "network.h"

namespace stretto {
namespace {

class Fifo : public Driver<Fifo> {
 public:
  Fifo(const Transfers& t, const Network& net, int64_t num_links)
      : Driver(t, net, num_links, [&](int32_t x) { return net.routes.size(t.route[x]); }), free_at_(num_links, 0),
        last_(num_links, kNothing), hop_(t.count, 0), tail_(t.count, 0), slowest_(t.count, 0) {
    simulate();
  }

  void begin(int32_t x, double) { requests_.push_back(x); }

  void settle(double now) {
    std::sort(requests_.begin(), requests_.end());
    for (int32_t x : requests_) serve(x, now);
    requests_.clear();
  }

  void handle(const Event& e) {
    switch (e.kind) {
      case kHop: return requests_.push_back(e.transfer);
      case kReadDone: return read_done(e.transfer);
      case kArrive: return arrived(e.transfer, slowest_[e.transfer], e.time);
      default: return finish(e.transfer, e.time);
    }
  }

 private:
  void serve(int32_t x, double now) {
    const int32_t* route = net_.routes.begin(t_.route[x]);
    int32_t hop = hop_[x]++, link = route[hop];
    double bytes = t_.bytes[x], busy = bytes / net_.rate[link], alpha = net_.alpha[link];
    double begins = std::max(now, free_at_[link]);
    if (begins > same_moment(now))
      blame(stage(x, hop), last_[link]);
    else if (hop > 0)
      blame(stage(x, hop), stage(casts_.owner(x, hop - 1), hop - 1));
    double occupied = busy + (net_.alpha_blocks ? alpha : 0);
    free_at_[link] = begins + occupied;
    last_[link] = stage(x, hop);
    run.link_busy[link] += occupied, run.link_bytes[link] += bytes;
    if (records_load()) record_load(link, begins, begins + occupied, 1);
    if (begins + busy >= tail_[x]) tail_[x] = begins + busy, slowest_[x] = stage(x, hop);  // else its tail is still to come in
    tail_[x] += alpha;
    if (hop == 0)
      casts_.each_member(x, [&](int32_t m) {
        run.start[m] = begins;
        if (has_read_gates(m)) queue_.push({begins + occupied, m, kReadDone});
      });
    casts_.each_follower(x, hop + 1, [&](int32_t f) {
      hop_[f] = hop + 1, tail_[f] = tail_[x], slowest_[f] = slowest_[x];
      queue_.push({begins + alpha, f, kHop});
    });
    if (hop + 1 < net_.routes.size(t_.route[x]))
      queue_.push({begins + alpha, x, kHop});
    else
      queue_.push({tail_[x], x, kArrive});
  }

  std::vector<double> free_at_;
  std::vector<int64_t> last_;  // the stage that a link served last
  std::vector<int32_t> hop_, requests_;
  std::vector<double> tail_;      // when the last byte of a transfer leaves the link it was served by last
  std::vector<int64_t> slowest_;  // the stage that decides this
};

}  // namespace

Run simulate_fifo(const Transfers& t, const Network& net, int64_t num_links) {
  return std::move(Fifo(t, net, num_links).run);
}
}  // namespace stretto

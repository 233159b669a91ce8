// SPDX-License-Identifier: Apache-2.0
// Time-expanded greedy: at every moment free hops are given chunks that their receivers lack.
//
// A chunk may leave only after it has arrived, and a hop starts only when every link on it is free at the moment the
// message reaches it, so the plan is a schedule that the simulator's fifo links can run. Hops into one device that end
// on different links are matched with chunks together, those with the fewest choices first and then the chunks that the
// fewest of them could bring: a chunk that only one link can bring is not taken by another.
#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <queue>

#include "arrays.h"

namespace stretto {
namespace {

// The network and the demand, as one device of each symmetry orbit sees them (without symmetry: all devices).
struct Problem {
  int32_t num_devices, num_chunks;
  std::vector<int32_t> hop_src, hop_dst;
  std::vector<int64_t> link_ptr;  // per hop: the links it passes
  std::vector<int32_t> link;
  std::vector<double> alpha, rate;  // per link: us, bytes per us
  // A chunk that the receiver of hop h calls c is there[shift[h]][c] to the sender, and back[shift[h]] undoes that.
  std::vector<int32_t> shift;
  std::vector<std::vector<int32_t>> there, back;  // an empty table: the same name on both sides
  std::vector<double> bytes;                      // per chunk
  std::vector<int32_t> kind;                      // chunks of one kind are translations of one another
  std::vector<int32_t> region;                    // per device: where a chunk is brought once and spread from
  std::vector<uint8_t> crosses;                   // per hop: it leads from one region to another
  std::vector<int32_t> goal;                      // per chunk: the only place that wants it; empty: all want all
  std::vector<double> distance;                   // goal.size() > 0: [device][place], falling along useful hops
  int32_t num_places = 0;
  bool alpha_blocks = false, mirrored = false;
};

struct Plan {
  std::vector<double> start, arrive;
  std::vector<int32_t> hop, chunk;  // chunk as the receiver names it
  int64_t missing = 0;  // deliveries that no hop could make; -1: there was no time to find out
};

constexpr int kMaxSources = 24;  // hops that end on one link: after so many useful ones the rest is not looked at

inline double same_moment(double t) { return t + 1e-9 * std::max(1.0, t); }

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 0x2545F4914F6CDD1Dull) {}
  uint32_t next() {
    state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
    return (uint32_t)(state_ >> 32);
  }
  uint32_t below(uint32_t n) { return (uint32_t)((uint64_t(next()) * n) >> 32); }

 private:
  uint64_t state_;
};

class Bits {
 public:
  Bits(int64_t rows, int64_t columns) : words_((columns + 63) / 64), data_(rows * words_, 0) {}
  bool test(int64_t r, int64_t c) const { return data_[r * words_ + c / 64] >> (c % 64) & 1; }
  void set(int64_t r, int64_t c) { data_[r * words_ + c / 64] |= uint64_t(1) << (c % 64); }
  void clear(int64_t r, int64_t c) { data_[r * words_ + c / 64] &= ~(uint64_t(1) << (c % 64)); }
  const uint64_t* row(int64_t r) const { return data_.data() + r * words_; }
  int64_t words() const { return words_; }

 private:
  int64_t words_;
  std::vector<uint64_t> data_;
};

template <class Visit>
void each_bit(uint64_t word, int64_t at, Visit&& visit) {
  for (; word; word &= word - 1) visit((int32_t)(at * 64 + std::countr_zero(word)));
}

// The hops into a device that end on the same link.
struct Port {
  int32_t device, link;
  bool crosses;
  std::vector<int32_t> hops;
  double period, latency;  // between two chunks of the usual size, and until the first, over its best hop
};

struct Offer {  // what one port could bring now
  int32_t port;
  std::vector<std::pair<int32_t, int32_t>> pairs;  // (chunk, hop)
};

using Clock = std::chrono::steady_clock;

class Greedy {
 public:
  Greedy(const Problem& p, const std::vector<int64_t>& held, uint64_t seed, bool once, bool patient,
         Clock::time_point end)
      : p_(p), end_(end), random_(seed), once_(once), patient_(patient), single_(!p.goal.empty()),
        has_(p.num_devices, p.num_chunks), lacks_(p.num_devices, p.num_chunks),
        free_at_(p.alpha.size(), 0.0), wakes_at_(p.hop_src.size(), -1.0) {
    int32_t kinds = 0, regions = 0;
    for (int32_t k : p.kind) kinds = std::max(kinds, k + 1);
    for (int32_t r : p.region) regions = std::max(regions, r + 1);
    holders_.assign(kinds, 0);
    in_region_.assign(int64_t(regions) * p.num_chunks, 0);
    choices_.assign(p.num_chunks, 0);
    for (int32_t d = 0; d < p.num_devices; d++)
      for (int32_t c = 0; c < p.num_chunks; c++) lacks_.set(d, c);
    for (int64_t slot : held) {
      auto d = (int32_t)(slot / p.num_chunks), c = (int32_t)(slot % p.num_chunks);
      lacks_.clear(d, c);
      has_.set(d, c);
      count(d, c);
      if (single_ && done(d, c)) has_.clear(d, c);
    }
    if (single_) {
      for (int64_t slot : held) left_ += !done((int32_t)(slot / p.num_chunks), (int32_t)(slot % p.num_chunks));
    } else {
      left_ = int64_t(p.num_devices) * p.num_chunks - (int64_t)held.size();
    }
    make_ports();
  }

  Plan run() {
    push(0);
    while (left_ > 0 && !late_) {
      if (times_.empty() && arrivals_.empty()) {
        if (!once_ && !patient_) break;
        once_ = patient_ = false;  // a region cannot spread what it got, or the faster links have nothing to bring
        push(now_);
      }
      advance();
      for (int pass = any_crosses_ ? 0 : 1; pass < 2 && left_ > 0 && !late_; pass++) serve(pass == 0);
    }
    plan_.missing = late_ && left_ > 0 ? -1 : left_;
    return std::move(plan_);
  }

 private:
  struct Arrival {
    double time;
    int32_t device, chunk;
    bool operator>(const Arrival& o) const {
      return time != o.time ? time > o.time : std::pair(device, chunk) > std::pair(o.device, o.chunk);
    }
  };

  void make_ports() {
    std::vector<std::vector<int32_t>> by_link(p_.alpha.size());
    for (int32_t h = 0; h < (int32_t)p_.hop_src.size(); h++) by_link[p_.link[p_.link_ptr[h + 1] - 1]].push_back(h);
    std::vector<std::vector<int32_t>> of_device(p_.num_devices);
    for (auto& hops : by_link) {
      // With symmetry several devices may end on the same link's orbit, and a link may bring local and foreign chunks.
      std::sort(hops.begin(), hops.end(), [&](int32_t a, int32_t b) { return key(a) < key(b); });
      for (size_t i = 0; i < hops.size(); i++) {
        if (i == 0 || key(hops[i]) != key(hops[i - 1])) {
          of_device[p_.hop_dst[hops[i]]].push_back((int32_t)ports_.size());
          int32_t end = p_.link[p_.link_ptr[hops[i] + 1] - 1];
          ports_.push_back({p_.hop_dst[hops[i]], end, p_.crosses[hops[i]] != 0, {}, 0, 0});
          any_crosses_ |= ports_.back().crosses;
        }
        ports_.back().hops.push_back(hops[i]);
      }
    }
    double usual = 0;
    for (double b : p_.bytes) usual += b / (double)p_.bytes.size();
    for (Port& port : ports_)
      for (int32_t h : port.hops) {
        double period = 0;
        auto longest = [&](int32_t, double, double busy) { return period = std::max(period, busy), true; };
        double latency = walk(h, usual, longest);
        if (h == port.hops[0] || latency < port.latency) port.period = period, port.latency = latency;
      }
    lacking_.assign(p_.num_devices, 0);
    for (int32_t d = 0; d < p_.num_devices; d++)
      for (int64_t w = 0; w < lacks_.words(); w++) lacking_[d] += std::popcount(lacks_.row(d)[w]);
    ports_of_ = std::move(of_device);
    order_.resize(p_.num_devices);
    for (int32_t d = 0; d < p_.num_devices; d++) order_[d] = d;
  }

  std::pair<int32_t, bool> key(int32_t h) const { return {p_.hop_dst[h], p_.crosses[h] != 0}; }

  void push(double t) { times_.push(t); }

  void advance() {
    double first = times_.empty() ? arrivals_.top().time : times_.top();
    if (!arrivals_.empty()) first = std::min(first, arrivals_.top().time);
    double until = same_moment(first);
    while (!times_.empty() && times_.top() <= until) now_ = std::max(now_, times_.top()), times_.pop();
    while (!arrivals_.empty() && arrivals_.top().time <= until) {
      Arrival a = arrivals_.top();
      arrivals_.pop();
      now_ = std::max(now_, a.time);
      if (!single_ || !done(a.device, a.chunk)) has_.set(a.device, a.chunk);
    }
  }

  bool done(int32_t d, int32_t c) const { return distance(d, c) <= 0; }
  double distance(int32_t d, int32_t c) const { return p_.distance[int64_t(d) * p_.num_places + p_.goal[c]]; }

  void count(int32_t d, int32_t c) {
    holders_[p_.kind[c]]++;
    in_region_[int64_t(p_.region[d]) * p_.num_chunks + c]++;
  }

  // How long after the start of a message each link of a hop is reached, as the simulator cuts messages through. A
  // mirrored plan is to be run backwards in time, so that there the last link is the first and what begins here ends.
  template <class Visit>
  double walk(int32_t h, double bytes, Visit&& visit) const {
    int64_t first = p_.link_ptr[h], last = p_.link_ptr[h + 1] - 1;
    double at = 0, tail = 0, before = 0;
    for (int64_t i = first; i <= last; i++) {
      int32_t l = p_.link[p_.mirrored ? first + last - i : i];
      double busy = bytes / p_.rate[l], alpha = p_.alpha[l];
      if (i > first) at = std::max(at + before, tail - busy);
      before = alpha, tail = at + busy + alpha;
      double taken = busy + (p_.alpha_blocks ? alpha : 0);
      if (p_.mirrored)
        mirror_.push_back({l, at, taken});
      else if (!visit(l, at, taken))
        return -1;
    }
    for (; !mirror_.empty(); mirror_.pop_back()) {
      auto [l, began, taken] = mirror_.back();
      if (!visit(l, tail - began - taken, taken)) return mirror_.clear(), -1;
    }
    return tail;
  }

  bool ready(int32_t h, double bytes) const {
    return walk(h, bytes, [&](int32_t l, double at, double) { return free_at_[l] <= same_moment(now_ + at); }) >= 0;
  }

  // A hop that could be used but for its links: when it can be.
  void wake(int32_t h, double bytes) {
    double when = now_;
    walk(h, bytes, [&](int32_t l, double at, double) { return when = std::max(when, free_at_[l] - at), true; });
    if (when != wakes_at_[h]) push(wakes_at_[h] = when);
  }

  void serve(bool crossing) {
    for (int32_t i = p_.num_devices - 1; i > 0; i--) std::swap(order_[i], order_[random_.below(i + 1)]);
    for (int32_t d : order_) {
      if ((late_ = Clock::now() > end_)) return;
      offers_.clear();
      for (int32_t port : ports_of_[d])
        if (ports_[port].crosses == crossing) look(port);
      match();
    }
  }

  // Whether the other links into a device can bring all that it lacks before a message over this one arrives.
  bool needless(const Port& port) const {
    double by = now_ + port.latency * (1 - 1e-9), count = 0;
    for (int32_t other : ports_of_[port.device]) {
      const Port& q = ports_[other];
      if (q.link == port.link) continue;
      double room = by - std::max(now_, free_at_[q.link]) - q.latency;
      if (room >= 0) count += std::floor(room / q.period) + 1;
    }
    return count >= lacking_[port.device];
  }

  // Everything that a port could bring to its device at this moment.
  void look(int32_t at) {
    const Port& port = ports_[at];
    if (free_at_[port.link] > same_moment(now_ + slack_) || (patient_ && needless(port))) return;
    Offer offer{at, {}};
    size_t count = port.hops.size(), first = count > 1 ? random_.below((uint32_t)count) : 0;
    int useful = 0;
    for (size_t i = 0; i < count && useful < kMaxSources; i++) {
      int32_t h = port.hops[(first + i) % count];
      if (free_at_[p_.link[p_.link_ptr[h]]] > same_moment(now_ + slack_)) continue;
      size_t before = offer.pairs.size();
      single_ ? look_onward(h, offer) : look_lacking(h, offer);
      useful += offer.pairs.size() > before;
    }
    if (!offer.pairs.empty()) offers_.push_back(std::move(offer));
  }

  void look_lacking(int32_t h, Offer& offer) {
    int32_t a = p_.hop_src[h], b = p_.hop_dst[h];
    const auto& there = p_.there[p_.shift[h]];
    const uint64_t *lacks = lacks_.row(b), *has = has_.row(a);
    const int32_t* here = in_region_.data() + int64_t(p_.region[b]) * p_.num_chunks;
    bool barred = once_ && p_.crosses[h];
    double size = -1;
    bool fits = false;
    auto take = [&](int32_t c) {
      if (barred && here[c]) return;
      if (p_.bytes[c] != size) {
        size = p_.bytes[c], fits = ready(h, size);
        if (!fits) wake(h, size);
      }
      if (fits) offer.pairs.push_back({c, h});
    };
    for (int64_t w = 0; w < lacks_.words(); w++) {
      if (there.empty())
        each_bit(lacks[w] & has[w], w, take);
      else
        each_bit(lacks[w], w, [&](int32_t c) { if (has_.test(a, there[c])) take(c); });
    }
  }

  // Where each chunk has one goal: only what has come to the sender and gets nearer.
  void look_onward(int32_t h, Offer& offer) {
    int32_t a = p_.hop_src[h], b = p_.hop_dst[h];
    const auto& back = p_.back[p_.shift[h]];
    const uint64_t* has = has_.row(a);
    for (int64_t w = 0; w < has_.words(); w++)
      each_bit(has[w], w, [&](int32_t mine) {
        int32_t c = back.empty() ? mine : back[mine];
        if (!(distance(b, c) < distance(a, mine))) return;
        ready(h, p_.bytes[c]) ? offer.pairs.push_back({c, h}) : wake(h, p_.bytes[c]);
      });
  }

  void match() {
    while (!offers_.empty()) {
      if (offers_.size() > 1)
        for (const Offer& o : offers_) tally(o, 1);
      size_t least = 0;
      for (size_t i = 1; i < offers_.size(); i++)
        if (offers_[i].pairs.size() < offers_[least].pairs.size()) least = i;
      auto [chunk, hop] = pick(offers_[least]);
      if (offers_.size() > 1)
        for (const Offer& o : offers_) tally(o, -1);
      send(hop, chunk);
      std::swap(offers_[least], offers_.back());
      offers_.pop_back();
      for (size_t i = 0; i < offers_.size();) {
        auto& pairs = offers_[i].pairs;
        std::erase_if(pairs, [&](auto pair) {
          auto [c, h] = pair;
          return c == chunk || !ready(h, p_.bytes[c]) || !at_sender(h, c);
        });
        if (pairs.empty())
          std::swap(offers_[i], offers_.back()), offers_.pop_back();
        else
          i++;
      }
    }
  }

  // With symmetry one chunk may be offered under two names; where it has one goal, it leaves once.
  bool at_sender(int32_t h, int32_t c) const { return has_.test(p_.hop_src[h], sent_as(h, c)); }
  int32_t sent_as(int32_t h, int32_t c) const {
    const auto& there = p_.there[p_.shift[h]];
    return there.empty() ? c : there[c];
  }

  void tally(const Offer& o, int32_t by) {
    for (auto [c, h] : o.pairs) choices_[c] += by;
  }

  std::pair<int32_t, int32_t> pick(const Offer& offer) {
    std::pair<int32_t, int32_t> best{-1, -1};
    double best_rank[3] = {0, 0, 0};
    uint32_t ties = 0;
    for (auto [c, h] : offer.pairs) {
      double rank[3];
      if (single_) {
        rank[0] = -distance(p_.hop_dst[h], c), rank[1] = choices_[c];
      } else {
        rank[0] = choices_[c], rank[1] = holders_[p_.kind[c]];
      }
      rank[2] = offer.pairs.size() > 1 ? walk(h, p_.bytes[c], [](int32_t, double, double) { return true; }) : 0;
      int order = best.first < 0 ? -1 : 0;
      for (int i = 0; i < 3 && order == 0; i++) order = rank[i] < best_rank[i] ? -1 : rank[i] > best_rank[i] ? 1 : 0;
      if (order > 0) continue;
      ties = order < 0 ? 1 : ties + 1;
      if (order == 0 && random_.below(ties) != 0) continue;
      best = {c, h};
      std::copy(rank, rank + 3, best_rank);
    }
    return best;
  }

  void send(int32_t h, int32_t c) {
    int32_t b = p_.hop_dst[h];
    double arrives = walk(h, p_.bytes[c], [&](int32_t l, double at, double busy) {
      free_at_[l] = std::max(free_at_[l], now_ + at) + busy;
      slack_ = std::max(slack_, at);
      push(free_at_[l]);
      if (at > 0 && free_at_[l] - at > now_) push(free_at_[l] - at);
      return true;
    });
    plan_.start.push_back(now_), plan_.arrive.push_back(now_ + arrives);
    plan_.hop.push_back(h), plan_.chunk.push_back(c);
    arrivals_.push({now_ + arrives, b, c});
    if (single_) {
      has_.clear(p_.hop_src[h], sent_as(h, c));
      left_ -= done(b, c);
    } else {
      lacks_.clear(b, c);
      lacking_[b]--;
      count(b, c);
      left_--;
    }
  }

  const Problem& p_;
  Clock::time_point end_;
  bool late_ = false;
  Random random_;
  bool once_, patient_, single_, any_crosses_ = false;
  Bits has_, lacks_;  // has: arrived; lacks: neither arrived nor on the way
  std::vector<double> free_at_, wakes_at_;
  std::vector<int32_t> holders_, in_region_, choices_, order_, lacking_;
  std::vector<Port> ports_;
  std::vector<std::vector<int32_t>> ports_of_;
  std::vector<Offer> offers_;
  std::priority_queue<double, std::vector<double>, std::greater<double>> times_;
  std::priority_queue<Arrival, std::vector<Arrival>, std::greater<Arrival>> arrivals_;
  struct Passage {
    int32_t link;
    double at, taken;
  };
  mutable std::vector<Passage> mirror_;
  double now_ = 0, slack_ = 0;
  int64_t left_ = 0;
  Plan plan_;
};

template <class T>
std::vector<T> copy(In<T> values) {
  return {values.data(), values.data() + values.shape(0)};
}

nb::object schedule(int32_t num_devices, In<int32_t> hop_src, In<int32_t> hop_dst, In<int64_t> link_ptr,
                    In<int32_t> link, In<double> alpha_us, In<double> bytes_per_us, In<int32_t> shift,
                    In<int32_t> there, In<int32_t> back, In<double> nbytes, In<int32_t> kind,
                    In<int32_t> region, In<bool> crosses, In<int32_t> goal,
                    In<double> distance, In<int64_t> held, bool alpha_blocks, bool mirrored, bool once,
                    bool patient, uint64_t seed, double limit_s) {
  Problem p;
  p.num_devices = num_devices, p.num_chunks = (int32_t)nbytes.shape(0);
  p.hop_src = copy(hop_src), p.hop_dst = copy(hop_dst), p.link_ptr = copy(link_ptr), p.link = copy(link);
  p.alpha = copy(alpha_us), p.rate = copy(bytes_per_us), p.shift = copy(shift), p.bytes = copy(nbytes);
  p.kind = copy(kind), p.region = copy(region), p.goal = copy(goal), p.distance = copy(distance);
  p.crosses.assign(crosses.data(), crosses.data() + crosses.shape(0));
  p.num_places = (int32_t)(distance.shape(0) / std::max(num_devices, 1));
  p.alpha_blocks = alpha_blocks, p.mirrored = mirrored;
  p.there.resize(1), p.back.resize(1);  // table 0: no translation
  for (size_t at = 0; at < there.shape(0); at += p.num_chunks) {
    p.there.emplace_back(there.data() + at, there.data() + at + p.num_chunks);
    p.back.emplace_back(back.data() + at, back.data() + at + p.num_chunks);
  }
  std::vector<int64_t> start_with = copy(held);
  Plan plan;
  {
    nb::gil_scoped_release release;
    // Within a year: what is longer does not fit the clock.
    std::chrono::duration<double> limit(std::clamp(limit_s, 0.0, 3e7));
    Clock::time_point end = Clock::now() + std::chrono::duration_cast<Clock::duration>(limit);
    plan = Greedy(p, start_with, seed, once, patient, end).run();
  }
  return nb::make_tuple(to_numpy(std::move(plan.start)), to_numpy(std::move(plan.arrive)),
                        to_numpy(std::move(plan.hop)), to_numpy(std::move(plan.chunk)), plan.missing);
}

}  // namespace

void bind_greedy(nb::module_& m) {
  m.def("greedy_schedule", &schedule, nb::arg("num_devices"), nb::arg("hop_src"), nb::arg("hop_dst"),
        nb::arg("link_ptr"), nb::arg("link"), nb::arg("alpha_us"), nb::arg("bytes_per_us"), nb::arg("shift"),
        nb::arg("there"), nb::arg("back"), nb::arg("nbytes"), nb::arg("kind"), nb::arg("region"), nb::arg("crosses"),
        nb::arg("goal"), nb::arg("distance"), nb::arg("held"), nb::arg("alpha_blocks"), nb::arg("mirrored"),
        nb::arg("once"), nb::arg("patient"), nb::arg("seed"), nb::arg("limit_s"));
}
}  // namespace stretto

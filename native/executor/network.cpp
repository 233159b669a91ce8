// SPDX-License-Identifier: Apache-2.0
#include "network.h"

#include <ucp/api/ucp.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>
#include <utility>

namespace stretto::executor {
namespace {

constexpr unsigned kMessage = 1;
constexpr uint32_t kAnnounce = 0, kAsk = 1, kAnswer = 2;  // what a message is

void check(ucs_status_t status, const char* what) {
  if (status != UCS_OK) throw std::runtime_error(std::string("UCX: ") + what + ": " + ucs_status_string(status));
}
}  // namespace

struct Network::Inner {
  ucp_context_h context = nullptr;
  ucp_worker_h worker = nullptr;
  uint64_t job = 0;
  uint32_t rank = 0;
  Heard heard;
  Lost lost;
  struct Peer {
    ucp_ep_h endpoint = nullptr;
    Inner* inner = nullptr;
    int rank = -1;
    int pending = 0;  // sends that are not finished yet
    bool used = false, asked = false, answered = false;
  };
  std::vector<Peer> peer;

  static void on_error(void* argument, ucp_ep_h, ucs_status_t status) {
    auto* p = static_cast<Peer*>(argument);
    p->inner->lost(p->rank, std::string("is gone (UCX: ") + ucs_status_string(status) + ")");
  }
  static void on_send(void* request, ucs_status_t status, void* argument) {
    auto* pair = static_cast<std::pair<Peer*, Transfer*>*>(argument);
    pair->second->failed = status != UCS_OK;
    pair->second->busy = false;
    --pair->first->pending;
    ucp_request_free(request);
    delete pair;
  }
  static void on_receive(void* request, ucs_status_t status, const ucp_tag_recv_info_t* info, void* argument) {
    auto* t = static_cast<Transfer*>(argument);
    t->failed = status != UCS_OK && status != UCS_ERR_MESSAGE_TRUNCATED;
    // Too long is too long, whatever of it was kept.
    t->length = status == UCS_ERR_MESSAGE_TRUNCATED ? UINT64_MAX : info->length;
    t->busy = false;
    t->done = true;
    t->request = nullptr;
    ucp_request_free(request);
  }
  static void on_announced(void* request, ucs_status_t, void* argument) {
    delete static_cast<Announcement*>(argument);
    ucp_request_free(request);
  }
  void say(uint32_t what, int to, Announcement a) {
    Peer& p = peer[static_cast<size_t>(to)];
    if (!p.endpoint) return;
    a.job = job;
    a.source = rank;
    a.what = what;
    auto* kept = new Announcement(a);
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
    param.cb.send = on_announced;
    param.user_data = kept;
    param.flags = UCP_AM_SEND_FLAG_COPY_HEADER;
    void* request = ucp_am_send_nbx(p.endpoint, kMessage, kept, sizeof *kept, nullptr, 0, &param);
    if (!UCS_PTR_IS_PTR(request)) delete kept;
  }
  static ucs_status_t on_message(void* argument, const void* header, size_t length, void*, size_t,
                                 const ucp_am_recv_param_t*) {
    auto* self = static_cast<Inner*>(argument);
    Announcement a;
    if (length != sizeof a) return UCS_OK;
    memcpy(&a, header, sizeof a);
    if (a.job != self->job || a.source >= self->peer.size()) return UCS_OK;
    if (a.what == kAnnounce) self->heard(a);
    // Who is about to leave asks whether all it sent has come: it has, as messages keep their order.
    if (a.what == kAsk) self->say(kAnswer, static_cast<int>(a.source), {});
    if (a.what == kAnswer) self->peer[a.source].answered = true;
    return UCS_OK;
  }
};

Network::Network(const std::string& transports, const std::string& devices, uint64_t job, int rank, int world, Heard heard,
                 Lost lost)
    : inner_(std::make_unique<Inner>()) {
  static const pid_t user = getpid();
  if (getpid() != user) throw std::runtime_error("UCX was in use when this process was forked, and cannot be used in it");
  inner_->job = job;
  inner_->rank = static_cast<uint32_t>(rank);
  inner_->heard = std::move(heard);
  inner_->lost = std::move(lost);
  inner_->peer.resize(static_cast<size_t>(world));
  ucp_config_t* config = nullptr;
  check(ucp_config_read(nullptr, nullptr, &config), "reading its configuration");
  try {
    if (!transports.empty()) check(ucp_config_modify(config, "TLS", transports.c_str()), "setting transports");
    if (!devices.empty()) check(ucp_config_modify(config, "NET_DEVICES", devices.c_str()), "setting devices");
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES;
    params.features = UCP_FEATURE_TAG | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
    check(ucp_init(&params, config, &inner_->context), "making a context");
  } catch (...) {
    ucp_config_release(config);
    throw;
  }
  ucp_config_release(config);
  ucp_worker_params_t worker{};
  worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  const ucs_status_t made = ucp_worker_create(inner_->context, &worker, &inner_->worker);
  if (made != UCS_OK) {
    ucp_cleanup(inner_->context);
    check(made, "making a worker");
  }
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kMessage;
  handler.cb = Inner::on_message;
  handler.arg = inner_.get();
  check(ucp_worker_set_am_recv_handler(inner_->worker, &handler), "setting a handler");
  check(ucp_worker_get_efd(inner_->worker, &event_fd_), "getting its descriptor");
  ucp_address_t* address = nullptr;
  size_t length = 0;
  check(ucp_worker_get_address(inner_->worker, &address, &length), "getting its address");
  address_.assign(reinterpret_cast<const char*>(address), length);
  ucp_worker_release_address(inner_->worker, address);
}

Network::~Network() {
  std::vector<void*> closing;
  for (auto& p : inner_->peer) {
    if (!p.endpoint) continue;
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    void* request = ucp_ep_close_nbx(std::exchange(p.endpoint, nullptr), &param);  // whoever asks now gets no answer
    if (UCS_PTR_IS_PTR(request)) closing.push_back(request);
  }
  for (void* request : closing) {
    for (int i = 0; i < 100000 && ucp_request_check_status(request) == UCS_INPROGRESS; ++i) ucp_worker_progress(inner_->worker);
    ucp_request_free(request);
  }
  // What was under way is given up step by step: a worker that still has some of it must not be destroyed.
  for (int idle = 0, all = 0; idle < 100 && all < 100000; ++all) idle = ucp_worker_progress(inner_->worker) ? 0 : idle + 1;
  ucp_worker_destroy(inner_->worker);
  ucp_cleanup(inner_->context);
}

void Network::connect(int peer, const std::string& address) {
  auto& p = inner_->peer.at(static_cast<size_t>(peer));
  p.inner = inner_.get();
  p.rank = peer;
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = Inner::on_error;
  params.err_handler.arg = &p;
  check(ucp_ep_create(inner_->worker, &params, &p.endpoint), "connecting");
}

bool Network::progress() { return ucp_worker_progress(inner_->worker) != 0; }

bool Network::arm() { return ucp_worker_arm(inner_->worker) == UCS_OK; }

void Network::send(Transfer& t, size_t bytes, int peer, uint64_t tag) {
  ucp_request_param_t param{};
  auto& p = inner_->peer[static_cast<size_t>(peer)];
  auto* pair = new std::pair<Inner::Peer*, Transfer*>(&p, &t);
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.send = Inner::on_send;
  param.user_data = pair;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  t.busy = true;
  p.used = true;
  ++p.pending;
  void* request = ucp_tag_send_nbx(p.endpoint, t.bytes.get(), bytes, tag, &param);
  if (UCS_PTR_IS_PTR(request)) return;
  delete pair;
  --p.pending;
  t.busy = false;
  if (UCS_PTR_IS_ERR(request))
    inner_->lost(peer, std::string("is gone (UCX: ") + ucs_status_string(UCS_PTR_STATUS(request)) + ")");
}

void Network::receive(Transfer& t, size_t bytes, uint64_t tag) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE |
                       UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
  param.cb.recv = Inner::on_receive;
  param.user_data = &t;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  t.busy = true;
  t.done = t.failed = false;
  void* request = ucp_tag_recv_nbx(inner_->worker, t.bytes.get(), bytes, tag, UINT64_MAX, &param);
  if (UCS_PTR_IS_PTR(request)) {
    if (t.busy) t.request = request;
    return;
  }
  t.busy = false;
  t.done = t.failed = true;
}

void Network::cancel(Transfer& t) {
  if (t.request) ucp_request_cancel(inner_->worker, t.request);
}

void Network::announce(int peer, const Announcement& a) { inner_->say(kAnnounce, peer, a); }

bool Network::sent(int peer) const { return !inner_->peer[static_cast<size_t>(peer)].pending; }

bool Network::received(int peer) {
  auto& p = inner_->peer[static_cast<size_t>(peer)];
  if (!p.used) return true;
  if (p.pending) return false;
  if (!std::exchange(p.asked, true)) inner_->say(kAsk, peer, {});
  return p.answered;
}
}  // namespace stretto::executor

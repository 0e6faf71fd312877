// The all-to-all: every pair exchanges one length and that many bytes, all pairs at once.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "team.h"

namespace standin {
namespace {

constexpr std::size_t kHeader = sizeof(std::uint64_t);

// Both directions of one pair: how many bytes of header plus payload have passed.
struct Flow {
    int socket;
    int rank;
    const char *send;
    std::uint64_t send_size;
    std::size_t sent = 0;
    char *recv = nullptr;
    std::uint64_t recv_size = 0;
    std::size_t received = 0;

    bool sending() const { return sent < kHeader + send_size; }
    bool receiving() const { return received < kHeader || received < kHeader + recv_size; }
};

[[noreturn]] void lost(const Flow &flow, const std::string &reason) {
    throw Failure("lost rank " + std::to_string(flow.rank) + ": " + reason);
}

void push(Flow &flow, std::size_t chunk) {
    const bool head = flow.sent < kHeader;
    const char *from = head ? reinterpret_cast<const char *>(&flow.send_size) + flow.sent : flow.send + (flow.sent - kHeader);
    const std::size_t left = head ? kHeader - flow.sent : kHeader + flow.send_size - flow.sent;
    const ssize_t count = send(flow.socket, from, chunk > 0 ? std::min(left, chunk) : left, MSG_NOSIGNAL);
    if (count < 0 && errno != EAGAIN && errno != EINTR) lost(flow, std::strerror(errno));
    if (count > 0) flow.sent += static_cast<std::size_t>(count);
}

void pull(Flow &flow) {
    const bool head = flow.received < kHeader;
    char *to = head ? reinterpret_cast<char *>(&flow.recv_size) + flow.received : flow.recv + (flow.received - kHeader);
    const std::size_t left = head ? kHeader - flow.received : kHeader + flow.recv_size - flow.received;
    const ssize_t count = recv(flow.socket, to, left, 0);
    if (count == 0) lost(flow, "it closed the connection");
    if (count < 0 && errno != EAGAIN && errno != EINTR) lost(flow, std::strerror(errno));
    if (count <= 0) return;
    flow.received += static_cast<std::size_t>(count);
    if (head && flow.received == kHeader && flow.recv_size > 0) {
        flow.recv = static_cast<char *>(nvshmem_malloc(flow.recv_size));
        if (flow.recv == nullptr) lost(flow, "no memory for what it sends");
    }
}

std::string late_ranks(const std::vector<Flow> &flows) {
    std::string text = "timeout in an exchange; waiting for rank";
    for (const Flow &flow : flows)
        if (flow.sending() || flow.receiving()) text += " " + std::to_string(flow.rank);
    return text;
}

void run(std::vector<Flow> &flows, const Deadline &deadline, std::size_t chunk) {
    std::vector<pollfd> entries(flows.size());
    while (true) {
        bool busy = false;
        for (std::size_t i = 0; i < flows.size(); ++i) {
            const int events = (flows[i].sending() ? POLLOUT : 0) | (flows[i].receiving() ? POLLIN : 0);
            entries[i] = {events != 0 ? flows[i].socket : -1, static_cast<short>(events), 0};
            busy = busy || events != 0;
        }
        if (!busy) return;
        if (poll(entries.data(), entries.size(), deadline.milliseconds_left()) == 0) throw Failure(late_ranks(flows));
        for (std::size_t i = 0; i < flows.size(); ++i) {
            if (flows[i].receiving() && (entries[i].revents & (POLLIN | POLLHUP | POLLERR)) != 0) pull(flows[i]);
            if (flows[i].sending() && (entries[i].revents & POLLOUT) != 0) push(flows[i], chunk);
        }
    }
}

}  // namespace

void exchange(const Team &team, const void *const *send, const std::size_t *send_bytes, void **recv, std::size_t *recv_bytes,
              std::size_t chunk) {
    std::vector<Flow> flows;
    for (int rank = 0; rank < team.ranks; ++rank) {
        const auto at = static_cast<std::size_t>(rank);
        if (rank != team.rank) flows.push_back({team.sockets[at], rank, static_cast<const char *>(send[at]), send_bytes[at]});
    }
    const Deadline deadline(team.timeout_ms);
    try {
        run(flows, deadline, chunk);
    } catch (const Failure &) {
        for (const Flow &flow : flows) nvshmem_free(flow.recv);
        throw;
    }
    for (const Flow &flow : flows) {
        recv[flow.rank] = flow.recv;
        recv_bytes[flow.rank] = flow.recv_size;
    }
    const auto own = static_cast<std::size_t>(team.rank);
    recv_bytes[own] = send_bytes[own];
    recv[own] = send_bytes[own] > 0 ? nvshmem_malloc(send_bytes[own]) : nullptr;
    if (send_bytes[own] > 0) std::memcpy(recv[own], send[own], send_bytes[own]);
}

}  // namespace standin

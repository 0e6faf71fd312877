// How the ranks find each other: rank 0 listens where the unique id says, collects everybody's own port, and sends the list to all.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "team.h"

namespace standin {
namespace {

constexpr std::uint32_t kMagic = 0x5eed0e90;

struct Hello {
    std::uint32_t magic;
    std::int32_t ranks;
    std::int32_t rank;
    std::uint32_t port;
};

struct Place {
    std::uint32_t address;  // network order
    std::uint32_t port;
};

std::string why(const std::string &what) { return what + ": " + std::strerror(errno); }

void wait_for(int socket, short events, const Deadline &deadline, const std::string &what) {
    pollfd entry{socket, events, 0};
    if (poll(&entry, 1, deadline.milliseconds_left()) <= 0) throw Failure("timeout: " + what);
}

void send_all(int socket, const void *data, std::size_t size, const Deadline &deadline) {
    auto *from = static_cast<const char *>(data);
    while (size > 0) {
        wait_for(socket, POLLOUT, deadline, "a rank does not read");
        const ssize_t sent = send(socket, from, size, MSG_NOSIGNAL);
        if (sent < 0 && errno != EINTR && errno != EAGAIN) throw Failure(why("send"));
        if (sent > 0) from += sent, size -= static_cast<std::size_t>(sent);
    }
}

void receive_all(int socket, void *data, std::size_t size, const Deadline &deadline) {
    auto *to = static_cast<char *>(data);
    while (size > 0) {
        wait_for(socket, POLLIN, deadline, "not all ranks came, see the message of rank 0");
        const ssize_t got = recv(socket, to, size, 0);
        if (got == 0) throw Failure("a rank closed its connection during the start, see the messages of the others");
        if (got < 0 && errno != EINTR && errno != EAGAIN) throw Failure(why("receive"));
        if (got > 0) to += got, size -= static_cast<std::size_t>(got);
    }
}

int listen_on(std::uint16_t port, int backlog) {
    const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int yes = 1;
    setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    sockaddr_in here{};
    here.sin_family = AF_INET;
    here.sin_port = htons(port);
    if (bind(socket, reinterpret_cast<sockaddr *>(&here), sizeof here) != 0 || listen(socket, backlog) != 0)
        throw Failure(why("cannot listen on port " + std::to_string(port)));
    return socket;
}

std::uint32_t port_of(int socket) {
    sockaddr_in here{};
    socklen_t size = sizeof here;
    getsockname(socket, reinterpret_cast<sockaddr *>(&here), &size);
    return ntohs(here.sin_port);
}

std::uint32_t resolve(const char *host) {
    addrinfo hints{};
    hints.ai_family = AF_INET;
    hints.ai_socktype = SOCK_STREAM;
    addrinfo *found = nullptr;
    const int code = getaddrinfo(host, nullptr, &hints, &found);
    if (code != 0) throw Failure(std::string("cannot resolve ") + host + ": " + gai_strerror(code));
    const std::uint32_t address = reinterpret_cast<sockaddr_in *>(found->ai_addr)->sin_addr.s_addr;
    freeaddrinfo(found);
    return address;
}

// Tries again until the deadline: the other side may not have started yet.
int connect_to(const Place &place, const Deadline &deadline, const std::string &whom) {
    sockaddr_in there{};
    there.sin_family = AF_INET;
    there.sin_addr.s_addr = place.address;
    there.sin_port = htons(static_cast<std::uint16_t>(place.port));
    while (true) {
        const int left = deadline.milliseconds_left();
        const timeval limit{left / 1000, (left % 1000) * 1000 + 1000};
        const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
        if (connect(socket, reinterpret_cast<sockaddr *>(&there), sizeof there) == 0) return socket;
        const std::string reason = why("cannot reach " + whom);
        close(socket);
        if (left == 0) throw Failure("timeout: " + reason);
        usleep(20000);
    }
}

// The next rank that introduces itself; strangers are turned away.
Hello accept_rank(int listener, const Team &team, const Deadline &deadline, const std::string &missing, int *socket, std::uint32_t *from) {
    while (true) {
        wait_for(listener, POLLIN, deadline, missing);
        sockaddr_in there{};
        socklen_t size = sizeof there;
        *socket = accept4(listener, reinterpret_cast<sockaddr *>(&there), &size, SOCK_CLOEXEC);
        if (*socket < 0) continue;
        Hello hello{};
        receive_all(*socket, &hello, sizeof hello, deadline);
        *from = there.sin_addr.s_addr;
        if (hello.magic == kMagic && hello.ranks == team.ranks && hello.rank > 0 && hello.rank < team.ranks &&
            team.sockets[static_cast<std::size_t>(hello.rank)] < 0)
            return hello;
        close(*socket);
    }
}

std::string missing_ranks(const Team &team) {
    std::string text = "rank " + std::to_string(team.rank) + " waited for the other ranks; missing:";
    for (int rank = 0; rank < team.ranks; ++rank)
        if (rank != team.rank && team.sockets[static_cast<std::size_t>(rank)] < 0) text += " " + std::to_string(rank);
    return text;
}

void lead(Team &team, int listener, const Deadline &deadline) {
    std::vector<Place> places(static_cast<std::size_t>(team.ranks));
    for (int count = 1; count < team.ranks; ++count) {
        int socket = -1;
        std::uint32_t from = 0;
        const Hello hello = accept_rank(listener, team, deadline, missing_ranks(team), &socket, &from);
        team.sockets[static_cast<std::size_t>(hello.rank)] = socket;
        places[static_cast<std::size_t>(hello.rank)] = {from, hello.port};
    }
    for (int rank = 1; rank < team.ranks; ++rank)
        send_all(team.sockets[static_cast<std::size_t>(rank)], places.data(), places.size() * sizeof(Place), deadline);
}

void join(Team &team, int listener, const nvshmemx_uniqueid_t &id, const Deadline &deadline) {
    const Hello hello{kMagic, team.ranks, team.rank, port_of(listener)};
    const Place leader{resolve(id.host), static_cast<std::uint32_t>(id.port)};
    team.sockets[0] = connect_to(leader, deadline, std::string("rank 0 at ") + id.host + ":" + std::to_string(id.port));
    send_all(team.sockets[0], &hello, sizeof hello, deadline);
    std::vector<Place> places(static_cast<std::size_t>(team.ranks));
    receive_all(team.sockets[0], places.data(), places.size() * sizeof(Place), deadline);
    for (int rank = 1; rank < team.rank; ++rank) {
        Place place = places[static_cast<std::size_t>(rank)];
        // Seen as a loopback address by rank 0, so it lives where rank 0 lives: we know that host by another address.
        if ((ntohl(place.address) >> 24) == 127) place.address = leader.address;
        const int socket = connect_to(place, deadline, "rank " + std::to_string(rank));
        send_all(socket, &hello, sizeof hello, deadline);
        team.sockets[static_cast<std::size_t>(rank)] = socket;
    }
    for (int count = team.rank + 1; count < team.ranks; ++count) {
        int socket = -1;
        std::uint32_t from = 0;
        const Hello other = accept_rank(listener, team, deadline, missing_ranks(team), &socket, &from);
        team.sockets[static_cast<std::size_t>(other.rank)] = socket;
    }
}

}  // namespace

Team connect_team(const nvshmemx_init_attr_t &attr) {
    const Deadline deadline(attr.timeout_ms);
    Team team{attr.rank, attr.ranks, attr.timeout_ms, std::vector<int>(static_cast<std::size_t>(attr.ranks), -1)};
    const int listener = listen_on(attr.rank == 0 ? static_cast<std::uint16_t>(attr.id.port) : 0, attr.ranks);
    if (attr.rank == 0)
        lead(team, listener, deadline);
    else
        join(team, listener, attr.id, deadline);
    close(listener);
    const int yes = 1;
    for (const int socket : team.sockets) {
        if (socket < 0) continue;
        setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
    }
    return team;
}

}  // namespace standin

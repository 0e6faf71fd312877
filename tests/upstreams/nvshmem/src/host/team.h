// What the parts of the host library share: the ranks of this run and the time they give each other.
#pragma once

#include <chrono>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "nvshmemx.h"

namespace standin {

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Deadline {
  public:
    explicit Deadline(int milliseconds) : end_(Clock::now() + std::chrono::milliseconds(milliseconds)) {}

    int milliseconds_left() const {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end_ - Clock::now()).count();
        return left > 0 ? static_cast<int>(left) : 0;
    }

  private:
    using Clock = std::chrono::steady_clock;
    Clock::time_point end_;
};

struct Team {
    int rank = -1;
    int ranks = -1;
    int timeout_ms = 0;
    std::vector<int> sockets;  // by rank; our own is -1
};

// Connects all ranks with each other; throws Failure naming the ranks that did not come.
Team connect_team(const nvshmemx_init_attr_t &attr);

// One exchange; throws Failure naming the ranks that are gone or late.
void exchange(const Team &team, const void *const *send, const std::size_t *send_bytes, void **recv, std::size_t *recv_bytes,
              std::size_t chunk);

}  // namespace standin

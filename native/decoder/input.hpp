// Lines from standard input, read without blocking the step loop.
//
// Invariants: next_line() hands out complete lines only, without "\n" and without a trailing "\r". A line longer than
// max_line_bytes comes out once, cut to max_line_bytes + 1, so that its size says it is too long; the rest of it is dropped.
// So the buffer is bounded.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace ringfence {

class Input {
public:
    Input(int fd, size_t max_line_bytes);

    // Waits up to timeout_ms for data (0: not at all, -1: for ever) and reads what is there.
    void poll(int timeout_ms);

    // The next complete line, valid until the next call of poll().
    std::optional<std::string_view> next_line();

    bool is_at_end() const { return is_at_end_; }

private:
    void read_available();

    int fd_;
    size_t max_line_bytes_;
    std::string buffer_;
    size_t start_ = 0;    // of the first line not handed out
    size_t scanned_ = 0;  // no "\n" in [start_, scanned_)
    bool is_skipping_ = false;
    bool is_at_end_ = false;
};

}  // namespace ringfence

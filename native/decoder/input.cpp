#include "input.hpp"

#include <cerrno>
#include <cstring>
#include <poll.h>
#include <unistd.h>

namespace ringfence {

namespace {
constexpr size_t read_bytes = 64 * 1024;
}

Input::Input(int fd, size_t max_line_bytes) : fd_(fd), max_line_bytes_(max_line_bytes) {
    buffer_.reserve(4 * read_bytes);
}

void Input::poll(int timeout_ms) {
    if (is_at_end_) return;
    buffer_.erase(0, start_);
    scanned_ -= start_;
    start_ = 0;
    while (true) {
        pollfd ready{fd_, POLLIN, 0};
        const int count = ::poll(&ready, 1, timeout_ms);
        if (count <= 0) return;  // nothing there, or EINTR: the caller comes again
        const size_t before = buffer_.size();
        read_available();
        if (is_at_end_ || buffer_.size() - before < read_bytes || buffer_.size() > max_line_bytes_) return;
        timeout_ms = 0;
    }
}

void Input::read_available() {
    const size_t before = buffer_.size();
    buffer_.resize(before + read_bytes);
    const ssize_t count = read(fd_, buffer_.data() + before, read_bytes);
    buffer_.resize(before + (count > 0 ? size_t(count) : 0));
    if (count == 0 || (count < 0 && errno != EINTR && errno != EAGAIN)) is_at_end_ = true;
}

std::optional<std::string_view> Input::next_line() {
    while (true) {
        const void* found = std::memchr(buffer_.data() + scanned_, '\n', buffer_.size() - scanned_);
        const size_t begin = start_;
        if (found == nullptr) {
            scanned_ = buffer_.size();
            if (scanned_ - begin <= max_line_bytes_) return std::nullopt;
            start_ = scanned_;
            if (is_skipping_) continue;
            is_skipping_ = true;
            return std::string_view(buffer_).substr(begin, max_line_bytes_ + 1);
        }
        size_t end = size_t(static_cast<const char*>(found) - buffer_.data());
        start_ = scanned_ = end + 1;
        if (is_skipping_) {
            is_skipping_ = false;
            continue;
        }
        if (end > begin && buffer_[end - 1] == '\r') --end;
        return std::string_view(buffer_).substr(begin, end - begin);
    }
}

}  // namespace ringfence

// The lines of one step, gathered and written together.
//
// Invariant: everything appended since the last flush() leaves in one write(2) (more only when the pipe takes less), so the
// reader wakes once a step however many slots produced a token. Nothing else in this program writes to standard output.
// A closed output ends the process: without its reader the decoder has no purpose.
#pragma once

#include <charconv>
#include <string>
#include <string_view>

namespace ringfence {

class Output {
public:
    explicit Output(int fd);

    Output& operator<<(std::string_view text) {
        buffer_.append(text);
        return *this;
    }
    Output& operator<<(char symbol) {
        buffer_.push_back(symbol);
        return *this;
    }
    template <typename Integer, typename = std::enable_if_t<std::is_integral_v<Integer>>>
    Output& operator<<(Integer value) {
        char digits[24];
        const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
        buffer_.append(digits, size_t(end - digits));
        return *this;
    }
    // Shortest form with `precision` significant digits.
    Output& number(double value, int precision = 7);

    void flush();

private:
    int fd_;
    std::string buffer_;
};

}  // namespace ringfence

#include "base64.hpp"

#include <cstdint>

namespace ringfence {

namespace {

constexpr std::string_view alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

int value_of(char symbol) {
    if (symbol >= 'A' && symbol <= 'Z') return symbol - 'A';
    if (symbol >= 'a' && symbol <= 'z') return symbol - 'a' + 26;
    if (symbol >= '0' && symbol <= '9') return symbol - '0' + 52;
    if (symbol == '+') return 62;
    if (symbol == '/') return 63;
    return -1;
}

}  // namespace

std::string base64_encode(const void* bytes, size_t size_bytes) {
    const auto* data = static_cast<const unsigned char*>(bytes);
    std::string text;
    text.reserve((size_bytes + 2) / 3 * 4);
    for (size_t i = 0; i < size_bytes; i += 3) {
        const size_t left = size_bytes - i;
        const uint32_t group = uint32_t(data[i]) << 16 | (left > 1 ? uint32_t(data[i + 1]) << 8 : 0) |
                               (left > 2 ? uint32_t(data[i + 2]) : 0);
        text += alphabet[group >> 18];
        text += alphabet[group >> 12 & 63];
        text += left > 1 ? alphabet[group >> 6 & 63] : '=';
        text += left > 2 ? alphabet[group & 63] : '=';
    }
    return text;
}

std::optional<std::string> base64_decode(std::string_view text) {
    if (text.size() % 4 != 0) return std::nullopt;
    size_t padding = 0;
    while (padding < 2 && padding < text.size() && text[text.size() - 1 - padding] == '=') ++padding;
    std::string bytes;
    bytes.reserve(text.size() / 4 * 3);
    for (size_t i = 0; i < text.size(); i += 4) {
        uint32_t group = 0;
        for (size_t j = i; j < i + 4; ++j) {
            const bool is_padding = j >= text.size() - padding;
            const int value = is_padding ? 0 : value_of(text[j]);
            if (value < 0) return std::nullopt;
            group = group << 6 | uint32_t(value);
        }
        bytes += char(group >> 16);
        bytes += char(group >> 8 & 255);
        bytes += char(group & 255);
    }
    bytes.resize(bytes.size() - padding);
    return bytes;
}

}  // namespace ringfence

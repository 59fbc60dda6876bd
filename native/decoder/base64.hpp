// Base64 (RFC 4648, with padding). Decoding is strict: no blanks, no missing padding.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace ringfence {

std::string base64_encode(const void* bytes, size_t size_bytes);
std::optional<std::string> base64_decode(std::string_view text);

}  // namespace ringfence

// Plain arithmetic over a row of logits, written so that the compiler vectorises it. No state, no allocation.
//
// Every function is a pure function of its arguments and its result does not depend on where the row lies in memory, so a
// draw is reproducible. exp_approx() is used for single candidates and for whole rows alike: their sums agree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ringfence {

// exp(x) for x <= 0, relative error below 3e-7; 0 below -87.
inline float exp_approx(float x) {
    constexpr float log2e = 1.44269504088896f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    const bool is_zero = !(x > -87.0f);
    x = is_zero ? 0.0f : x;
    const int32_t n = int32_t(x * log2e - 0.5f);  // rounds to the nearest, x being negative
    const float fn = float(n);
    const float r = (x - fn * ln2_high) - fn * ln2_low;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int32_t bits = (n + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return is_zero ? 0.0f : p * scale;
}

struct Peak {
    float maximum;
    bool is_finite;  // no NaN and no +inf in the row (-inf is a token the model itself excludes)
};

Peak find_peak(const float* row, size_t size);

// The lowest index whose value is `maximum`.
size_t index_of(const float* row, size_t size, float maximum);

// Sum of exp((row[i] - maximum) * scale).
double sum_exp(const float* row, size_t size, float maximum, float scale);

// The same over the values below `threshold`.
double sum_exp_below(const float* row, size_t size, float maximum, float scale, float threshold);

}  // namespace ringfence

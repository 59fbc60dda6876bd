#include "logits.hpp"

#include <cfloat>
#include <cmath>

// The program is built for the plain instruction set; these loops also get an AVX2 version, chosen when it is loaded. Both
// give the same bits: the lanes are fixed, and AVX2 alone fuses nothing.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define VECTOR_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define VECTOR_CLONES
#endif

namespace ringfence {

namespace {
constexpr size_t lanes = 16;
}

VECTOR_CLONES
Peak find_peak(const float* row, size_t size) {
    float best[lanes];
    int32_t bad[lanes];
    for (size_t j = 0; j < lanes; ++j) {
        best[j] = -INFINITY;
        bad[j] = 0;
    }
    size_t i = 0;
    for (; i + lanes <= size; i += lanes) {
        for (size_t j = 0; j < lanes; ++j) {
            const float x = row[i + j];
            best[j] = x > best[j] ? x : best[j];
            bad[j] |= !(x <= FLT_MAX);
        }
    }
    Peak peak{-INFINITY, true};
    int32_t any_bad = 0;
    for (size_t j = 0; j < lanes; ++j) {
        peak.maximum = best[j] > peak.maximum ? best[j] : peak.maximum;
        any_bad |= bad[j];
    }
    for (; i < size; ++i) {
        peak.maximum = row[i] > peak.maximum ? row[i] : peak.maximum;
        any_bad |= !(row[i] <= FLT_MAX);
    }
    peak.is_finite = any_bad == 0;
    return peak;
}

VECTOR_CLONES
size_t index_of(const float* row, size_t size, float maximum) {
    size_t i = 0;
    for (; i + lanes <= size; i += lanes) {
        int32_t found = 0;
        for (size_t j = 0; j < lanes; ++j) found |= row[i + j] == maximum;
        if (found) break;
    }
    while (i < size && row[i] != maximum) ++i;
    return i;
}

VECTOR_CLONES
double sum_exp_below(const float* row, size_t size, float maximum, float scale, float threshold) {
    double total[lanes] = {};
    size_t i = 0;
    while (i + lanes <= size) {
        // Blocks in single precision, their sums in double: fast, and exact enough for a quarter of a million tokens.
        float block[lanes] = {};
        const size_t end = size - i > 64 * lanes ? i + 64 * lanes : size;
        for (; i + lanes <= end; i += lanes) {
            for (size_t j = 0; j < lanes; ++j) {
                const float weight = exp_approx((row[i + j] - maximum) * scale);
                block[j] += row[i + j] < threshold ? weight : 0.0f;
            }
        }
        for (size_t j = 0; j < lanes; ++j) total[j] += double(block[j]);
    }
    double sum = 0;
    for (size_t j = 0; j < lanes; ++j) sum += total[j];
    for (; i < size; ++i) sum += row[i] < threshold ? double(exp_approx((row[i] - maximum) * scale)) : 0.0;
    return sum;
}

double sum_exp(const float* row, size_t size, float maximum, float scale) {
    return sum_exp_below(row, size, maximum, scale, INFINITY);
}

}  // namespace ringfence

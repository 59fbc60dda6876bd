// How many prompt tokens a step may take while other requests stream, so that they keep their pace. Pure: measured times in,
// a number of tokens out.
//
// Two running averages: the time of a pure decode step, and the time that each prompt token added to a mixed one. A step is
// allowed `factor` times a pure decode step. Short prompts are allowed `short_ms` more of a step at least: no reader of a
// stream sees a pause of that length, and a request that waits for its first token does.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ringfence {

class Pace {
public:
    Pace(double factor, int64_t max_tokens) : factor_(factor), max_tokens_(max_tokens) {}

    int64_t budget_tokens() const { return tokens_in(std::max(0.0, factor_ - 1) * decode_ms_); }
    int64_t short_budget_tokens() const { return std::max(budget_tokens(), tokens_in(short_ms)); }

    void on_step(double ms, int64_t decode_tokens, int64_t prompt_tokens) {
        if (prompt_tokens == 0) {
            average(decode_ms_, ms);
        } else if (prompt_tokens >= 8) {
            const double rest_ms = decode_tokens > 0 ? ms - decode_ms_ : ms;
            average(prompt_token_ms_, std::max(rest_ms, ms * 0.05) / double(prompt_tokens));
        }
    }

private:
    static constexpr double short_ms = 4;

    int64_t tokens_in(double ms) const {
        constexpr int64_t min_tokens = 8;  // reading must get on, and a batch of fewer is inefficient
        if (factor_ <= 0) return max_tokens_;
        if (decode_ms_ <= 0 || prompt_token_ms_ <= 0) return std::min(min_tokens, max_tokens_);
        return std::min(max_tokens_, std::max(min_tokens, int64_t(ms / prompt_token_ms_)));
    }

    static void average(double& mean, double value) { mean = mean <= 0 ? value : mean + (value - mean) * 0.2; }

    double factor_;
    int64_t max_tokens_;
    double decode_ms_ = 0;
    double prompt_token_ms_ = 0;
};

}  // namespace ringfence

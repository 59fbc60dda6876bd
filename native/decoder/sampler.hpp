// Chooses one token from one row of logits.
//
// Order: penalties over the last penalty_last_n tokens of prompt and output, logit_bias; then at temperature 0 the largest
// logit (of equals the lowest id), otherwise top_k, top_p, min_p, temperature and a draw. With a grammar the token so chosen
// stands if the grammar allows it; if not, all tokens it refuses are removed and the choice is made again.
//
// A draw is a pure function of (seed, position, row), and a robust one: it is the largest of logit / temperature + noise, with
// Gumbel noise from a counter-based generator for each (seed, position, id), which is an exact draw from the softmax. Where
// the last bits of the logits differ (llama.cpp's results depend on what else is in the batch), the draw differs only if two
// such sums nearly tie; walking a cumulative sum would differ at every border between two candidates. No generator state
// exists, so a stream cut anywhere goes on with the same draws. Removing what a grammar refuses leaves the other sums as
// they were, so that choice is exact as well.
//
// The row is changed in place (few entries, or all when a grammar refuses): logprobs are computed from it before.
// One Sampler serves all slots, one at a time; its buffers are allocated once.
#pragma once

#include "grammar.hpp"
#include "logits.hpp"
#include "protocol.hpp"

#include <cstdint>
#include <vector>

namespace ringfence {

// The noise of one position: a number for each token id, from a counter-based generator.
class Noise {
public:
    Noise(uint64_t seed, uint64_t position);
    double uniform(uint64_t id) const;  // in (0, 1)
    double gumbel(uint64_t id) const;   // standard Gumbel distribution

private:
    uint64_t key_;
};

struct Choice {
    enum class Outcome { token, nonfinite, stuck };  // stuck: the grammar refuses the whole vocabulary
    Outcome outcome = Outcome::token;
    Token id = -1;
    float logprob = 0;                      // of the raw row; only with logprobs
    std::vector<Alternative> alternatives;  // likewise
};

class Sampler {
public:
    explicit Sampler(size_t vocabulary);

    // `row` has `vocabulary` logits. `history` is prompt and output so far. The result is valid until the next call.
    const Choice& choose(float* row, const SamplingOptions& options, Grammar* grammar, const std::vector<Token>& history,
                         uint64_t seed, uint64_t position);

private:
    struct Candidate {
        float logit;
        Token id;
    };
    static bool precedes(const Candidate& a, const Candidate& b) {
        return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
    }

    double describe(const float* row, const SamplingOptions& options, float maximum);
    void edit(float* row, Token id, float value);
    float original(const float* row, Token id) const;
    void penalise(float* row, const SamplingOptions& options, const std::vector<Token>& history);
    Token pick(const float* row, const SamplingOptions& options, float maximum, const Noise& noise);
    Token pick_allowed(float* row, const SamplingOptions& options, Grammar& grammar, const Noise& noise);
    Token draw(const float* row, const SamplingOptions& options, float maximum, const Noise& noise);
    Token draw_kept(float maximum, float scale, const Noise& noise) const;
    Token draw_all(const float* row, float maximum, float scale, const Noise& noise) const;
    void keep_mass(float maximum, double mass);
    void keep_min_p(double min_p, float maximum);
    void collect_top(const float* row, size_t count);
    void collect_above(const float* row, float threshold);
    void collect_mass(const float* row, float maximum, double mass);

    size_t vocabulary_;
    Choice choice_;
    std::vector<Candidate> candidates_;  // sorted by precedes()
    std::vector<Candidate> edits_;       // entries of the row as they were before penalties and biases
    std::vector<uint32_t> counts_;       // by id; zero between calls
    std::vector<llama_token_data> masked_;
};

}  // namespace ringfence

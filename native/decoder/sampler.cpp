#include "sampler.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace ringfence {

namespace {

uint64_t mix(uint64_t x) {  // the finaliser of splitmix64
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

constexpr double min_temperature = 1e-6;  // below it, greedy: 1/temperature would overflow
constexpr float head_width = 10;           // in units of logit / temperature below the best: what draw_all() draws one by one
constexpr size_t probed_tokens = 64;      // best candidates a grammar is asked about before the whole vocabulary is

}  // namespace

constexpr uint64_t golden = 0x9e3779b97f4a7c15u;
constexpr uint64_t tail_id = uint64_t(1) << 40, tail_walk_id = tail_id + 1;  // no token has these

Noise::Noise(uint64_t seed, uint64_t position) : key_(mix(mix(seed + golden) + golden * (position + 1))) {}

double Noise::uniform(uint64_t id) const {
    return (double(mix(key_ + golden * (id + 1)) >> 11) + 0.5) * 0x1.0p-53;
}

double Noise::gumbel(uint64_t id) const {
    return -std::log(-std::log(uniform(id)));
}

Sampler::Sampler(size_t vocabulary) : vocabulary_(vocabulary), counts_(vocabulary) {
    candidates_.reserve(vocabulary);
    choice_.alternatives.reserve(max_logprobs);
}

const Choice& Sampler::choose(float* row, const SamplingOptions& options, Grammar* grammar,
                              const std::vector<Token>& history, uint64_t seed, uint64_t position) {
    Peak peak = find_peak(row, vocabulary_);
    choice_.outcome = peak.is_finite ? Choice::Outcome::token : Choice::Outcome::nonfinite;
    if (!peak.is_finite) return choice_;
    const double log_total = options.logprobs >= 0 ? describe(row, options, peak.maximum) : 0;

    edits_.clear();
    if (options.has_penalties()) penalise(row, options, history);
    for (const auto& [id, bias] : options.logit_bias) edit(row, id, row[id] + bias);
    if (!edits_.empty()) peak = find_peak(row, vocabulary_);

    const Noise noise(seed, position);
    choice_.id = pick(row, options, peak.maximum, noise);
    if (grammar != nullptr && (choice_.id < 0 || !grammar->allows(choice_.id))) {
        choice_.id = pick_allowed(row, options, *grammar, noise);
    }
    if (choice_.id < 0) {
        choice_.outcome = Choice::Outcome::stuck;
    } else if (options.logprobs >= 0) {
        choice_.logprob = float(double(original(row, choice_.id)) - log_total);
    }
    return choice_;
}

// Fills in the alternatives; returns the logarithm of the row's sum of exponentials.
double Sampler::describe(const float* row, const SamplingOptions& options, float maximum) {
    const double log_total = double(maximum) + std::log(sum_exp(row, vocabulary_, maximum, 1));
    collect_top(row, size_t(options.logprobs));
    choice_.alternatives.clear();
    for (const Candidate& candidate : candidates_) {
        choice_.alternatives.push_back({candidate.id, float(double(candidate.logit) - log_total)});
    }
    return log_total;
}

void Sampler::edit(float* row, Token id, float value) {
    edits_.push_back({row[id], id});
    row[id] = value;
}

float Sampler::original(const float* row, Token id) const {
    for (const Candidate& before : edits_) {
        if (before.id == id) return before.logit;
    }
    return row[id];
}

void Sampler::penalise(float* row, const SamplingOptions& options, const std::vector<Token>& history) {
    const size_t window = options.penalty_last_n < 0
                              ? history.size()
                              : std::min(history.size(), size_t(options.penalty_last_n));
    const auto begin = history.end() - std::ptrdiff_t(window);
    for (auto id = begin; id != history.end(); ++id) ++counts_[size_t(*id)];
    for (auto id = begin; id != history.end(); ++id) {
        const uint32_t count = std::exchange(counts_[size_t(*id)], 0);
        if (count == 0) continue;  // seen already
        const double logit = double(row[*id]);
        const double scaled = logit > 0 ? logit / options.penalty_repeat : logit * options.penalty_repeat;
        edit(row, *id, float(scaled - count * options.penalty_freq - options.penalty_present));
    }
}

// -1 if every logit is -inf.
Token Sampler::pick(const float* row, const SamplingOptions& options, float maximum, const Noise& noise) {
    if (std::isinf(maximum)) return -1;
    if (options.temperature < min_temperature) return Token(index_of(row, vocabulary_, maximum));
    return draw(row, options, maximum, noise);
}

Token Sampler::draw(const float* row, const SamplingOptions& options, float maximum, const Noise& noise) {
    const float scale = float(1 / options.temperature);
    if (options.top_k > 0 && size_t(options.top_k) < vocabulary_) {
        collect_top(row, size_t(options.top_k));
        double total = 0;
        for (const Candidate& candidate : candidates_) total += double(exp_approx(candidate.logit - maximum));
        keep_mass(maximum, total * options.top_p);
    } else if (options.top_p < 1) {
        const double mass = sum_exp(row, vocabulary_, maximum, 1) * options.top_p;
        collect_mass(row, maximum, mass);
        keep_mass(maximum, mass);
    } else if (options.min_p > 0) {
        collect_above(row, maximum + float(std::log(options.min_p)));
    } else {
        return draw_all(row, maximum, scale, noise);
    }
    keep_min_p(options.min_p, maximum);
    return draw_kept(maximum, scale, noise);
}

Token Sampler::draw_kept(float maximum, float scale, const Noise& noise) const {
    double best = -INFINITY;
    Token chosen = candidates_.front().id;
    for (const Candidate& candidate : candidates_) {
        const double sum = double((candidate.logit - maximum) * scale) + noise.gumbel(uint64_t(candidate.id));
        if (sum > best) best = sum, chosen = candidate.id;
    }
    return chosen;
}

// Over the whole vocabulary: the head token by token, everything below it as one candidate with the tail's whole weight (the
// largest of several Gumbel sums is a Gumbel sum with the logarithm of their total weight). A quarter of a million tokens
// would cost a millisecond of noise otherwise.
Token Sampler::draw_all(const float* row, float maximum, float scale, const Noise& noise) const {
    const float threshold = maximum - head_width / scale;
    double best = -INFINITY;
    Token chosen = -1;
    for (size_t i = 0; i < vocabulary_; ++i) {
        if (row[i] < threshold) continue;
        const double sum = double((row[i] - maximum) * scale) + noise.gumbel(i);
        if (sum > best) best = sum, chosen = Token(i);
    }
    const double tail = sum_exp_below(row, vocabulary_, maximum, scale, threshold);
    if (tail <= 0 || std::log(tail) + noise.gumbel(tail_id) <= best) return chosen;
    double left = tail * noise.uniform(tail_walk_id);
    for (size_t i = 0; i < vocabulary_; ++i) {
        if (row[i] >= threshold) continue;
        const double weight = double(exp_approx((row[i] - maximum) * scale));
        if (weight <= 0) continue;
        chosen = Token(i);
        if ((left -= weight) < 0) break;
    }
    return chosen;
}

// top_p: the shortest run of best candidates that has at least `mass`; one at least.
void Sampler::keep_mass(float maximum, double mass) {
    double sum = 0;
    for (size_t i = 0; i < candidates_.size(); ++i) {
        sum += double(exp_approx(candidates_[i].logit - maximum));
        if (sum >= mass) {
            candidates_.resize(i + 1);
            return;
        }
    }
}

void Sampler::keep_min_p(double min_p, float maximum) {
    if (min_p <= 0) return;
    const float threshold = maximum + float(std::log(min_p));
    while (candidates_.size() > 1 && candidates_.back().logit < threshold) candidates_.pop_back();
}

// The best `count` candidates, sorted: a heap whose top is the worst one kept.
void Sampler::collect_top(const float* row, size_t count) {
    candidates_.clear();
    if (count == 0) return;
    float worst = -INFINITY;
    for (size_t i = 0; i < vocabulary_; ++i) {
        if (candidates_.size() == count) {
            if (row[i] <= worst) continue;  // of equals the lower id is in already
            std::pop_heap(candidates_.begin(), candidates_.end(), precedes);
            candidates_.pop_back();
        }
        candidates_.push_back({row[i], Token(i)});
        std::push_heap(candidates_.begin(), candidates_.end(), precedes);
        if (candidates_.size() == count) worst = candidates_.front().logit;
    }
    std::sort_heap(candidates_.begin(), candidates_.end(), precedes);
}

void Sampler::collect_above(const float* row, float threshold) {
    candidates_.clear();
    for (size_t i = 0; i < vocabulary_; ++i) {
        if (row[i] >= threshold) candidates_.push_back({row[i], Token(i)});
    }
    std::sort(candidates_.begin(), candidates_.end(), precedes);
}

// Enough of the best candidates, sorted, that their exp(logit - maximum) sum to `mass`: a threshold is lowered until they do,
// so only the head of the vocabulary is sorted.
void Sampler::collect_mass(const float* row, float maximum, double mass) {
    const double wanted = mass * (1 + 1e-6) + 1e-30;  // the sums below are in another order than the one behind `mass`
    for (float width = 4; width <= 64; width *= 2) {
        collect_above(row, maximum - width);
        double sum = 0;
        for (const Candidate& candidate : candidates_) sum += double(exp_approx(candidate.logit - maximum));
        if (sum >= wanted) return;
    }
    collect_above(row, maximum - 88);  // the rest weighs nothing
}

// The choice among the tokens that the grammar allows; -1 if there is none.
Token Sampler::pick_allowed(float* row, const SamplingOptions& options, Grammar& grammar, const Noise& noise) {
    if (options.temperature < min_temperature) {
        collect_top(row, std::min(probed_tokens, vocabulary_));
        masked_.clear();
        for (const Candidate& candidate : candidates_) masked_.push_back({candidate.id, candidate.logit, 0});
        grammar.mask(masked_);
        for (const llama_token_data& candidate : masked_) {
            if (!std::isinf(candidate.logit)) return candidate.id;
        }
    }
    masked_.clear();
    for (size_t i = 0; i < vocabulary_; ++i) masked_.push_back({Token(i), row[i], 0});
    grammar.mask(masked_);
    for (const llama_token_data& candidate : masked_) row[candidate.id] = candidate.logit;
    return pick(row, options, find_peak(row, vocabulary_).maximum, noise);
}

}  // namespace ringfence

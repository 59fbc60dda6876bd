// Lines of the tagged dialect (docs/protocol.md): commands parsed, answers formatted.
//
// Parsing is strict and never throws: a command with a usable request id but anything wrong in it becomes Refused, which is
// answered with ERR; a line without one becomes Garbage, which is only logged.
#pragma once

#include "output.hpp"

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ringfence {

using Token = int32_t;  // llama_token

constexpr int max_logprobs = 20;

struct SamplingOptions {
    double temperature = 0;  // 0: greedy
    double top_p = 1;
    double min_p = 0;
    int64_t top_k = 0;  // 0: all
    double penalty_repeat = 1;
    double penalty_freq = 0;
    double penalty_present = 0;
    int64_t penalty_last_n = 64;  // -1: everything
    uint64_t seed = 0;            // 0: from the clock
    int64_t logprobs = -1;        // -1: none; otherwise the number of alternatives
    std::vector<std::pair<Token, float>> logit_bias;
    std::string grammar;  // GBNF; empty: none

    bool has_penalties() const {
        return penalty_last_n != 0 && (penalty_repeat != 1 || penalty_freq != 0 || penalty_present != 0);
    }
};

struct Request {
    uint32_t rid = 0;
    bool is_embedding = false;
    int64_t max_new = 0;
    int64_t resume = 0;  // the last `resume` ids are the request's own earlier output
    SamplingOptions sampling;
    std::vector<Token> ids;
};

struct Command {
    enum class Kind { generate, embed, stop, quit, refused, garbage };
    Kind kind = Kind::garbage;
    Request request;    // stop and refused: only its rid
    std::string error;  // refused and garbage
};

struct Limits {
    int64_t vocabulary;
    size_t line_bytes;
};

Command parse_command(std::string_view line, const Limits& limits);

struct Summary {  // the fields of DONE
    int64_t generated = 0;
    int64_t prompt_tokens = 0;
    double prompt_ms = 0;
    double decode_ms = 0;
    std::string_view finish;
    int64_t reused = 0;
    int64_t prompt_read = 0;
};

struct Alternative {
    Token id;
    float logprob;
};

void write_resume(Output& out, uint32_t rid, int64_t reused);
void write_prompt_progress(Output& out, uint32_t rid, int64_t position, int64_t total, double chunk_ms, int64_t chunk);
void write_reused(Output& out, uint32_t rid, int64_t reused);
void write_token(Output& out, uint32_t rid, Token id);
void write_token(Output& out, uint32_t rid, Token id, float logprob, const std::vector<Alternative>& alternatives);
void write_embedding(Output& out, uint32_t rid, const std::vector<float>& embedding);
void write_done(Output& out, uint32_t rid, const Summary& summary);
void write_error(Output& out, uint32_t rid, std::string_view text);

}  // namespace ringfence

#include "protocol.hpp"

#include "base64.hpp"

#include <charconv>
#include <cmath>
#include <optional>

namespace ringfence {

namespace {

constexpr size_t max_grammar_bytes = 1 << 20;

template <typename Number>
std::optional<Number> to_number(std::string_view text) {
    Number value{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
    return value;
}

std::string quoted(std::string_view text) { return "'" + std::string(text.substr(0, 40)) + "'"; }

// Splits off the text up to the next blank.
std::string_view take_word(std::string_view& rest) {
    const size_t blank = rest.find(' ');
    const std::string_view word = rest.substr(0, blank);
    rest.remove_prefix(blank == std::string_view::npos ? rest.size() : blank + 1);
    return word;
}

// Each parse_* returns an empty string, or what is wrong.
std::string parse_ids(std::string_view text, const Limits& limits, std::vector<Token>& ids) {
    ids.reserve(text.size() / 4 + 1);
    const char* at = text.data();
    const char* const end = at + text.size();
    while (true) {
        Token id = -1;
        const auto [next, error] = std::from_chars(at, end, id);
        if (error != std::errc()) return "ids: expected decimal ids separated by commas";
        if (id < 0 || id >= limits.vocabulary) {
            return "ids: " + std::to_string(id) + " is outside the vocabulary of " + std::to_string(limits.vocabulary);
        }
        ids.push_back(id);
        if (next == end) return "";
        if (*next != ',') return "ids: expected decimal ids separated by commas";
        at = next + 1;
    }
}

std::string parse_logit_bias(std::string_view text, const Limits& limits, SamplingOptions& sampling) {
    while (!text.empty()) {
        const size_t comma = text.find(',');
        const std::string_view pair = text.substr(0, comma);
        text.remove_prefix(comma == std::string_view::npos ? text.size() : comma + 1);
        const size_t colon = pair.find(':');
        if (colon == std::string_view::npos) return "logit_bias: " + quoted(pair) + " is not id:bias";
        const auto id = to_number<Token>(pair.substr(0, colon));
        const auto bias = to_number<float>(pair.substr(colon + 1));
        if (!id || *id < 0 || *id >= limits.vocabulary || !bias || !std::isfinite(*bias)) {
            return "logit_bias: " + quoted(pair) + " is not id:bias with an id of the vocabulary and a finite bias";
        }
        sampling.logit_bias.emplace_back(*id, *bias);
    }
    return "";
}

std::string parse_grammar(std::string_view text, SamplingOptions& sampling) {
    auto grammar = base64_decode(text);
    if (!grammar || grammar->empty()) return "grammar: not base64 of a grammar";
    if (grammar->size() > max_grammar_bytes) return "grammar: longer than 1 MiB";
    if (grammar->find('\0') != std::string::npos) return "grammar: contains a zero byte";
    sampling.grammar = std::move(*grammar);
    return "";
}

struct RealKey {
    std::string_view name;
    double SamplingOptions::*member;
    double minimum, maximum;
};
constexpr RealKey real_keys[] = {
    {"temperature", &SamplingOptions::temperature, 0, 1e6},
    {"top_p", &SamplingOptions::top_p, 0, 1},
    {"min_p", &SamplingOptions::min_p, 0, 1},
    {"penalty_repeat", &SamplingOptions::penalty_repeat, 1e-6, 1e6},
    {"penalty_freq", &SamplingOptions::penalty_freq, -1e6, 1e6},
    {"penalty_present", &SamplingOptions::penalty_present, -1e6, 1e6},
};

struct IntegerKey {
    std::string_view name;
    int64_t SamplingOptions::*member;
    int64_t minimum, maximum;
};
constexpr IntegerKey integer_keys[] = {
    {"top_k", &SamplingOptions::top_k, 0, INT32_MAX},
    {"penalty_last_n", &SamplingOptions::penalty_last_n, -1, INT32_MAX},
    {"logprobs", &SamplingOptions::logprobs, 0, max_logprobs},
};

std::string parse_option(std::string_view key, std::string_view text, const Limits& limits, Request& request) {
    SamplingOptions& sampling = request.sampling;
    const std::string wrong = std::string(key.substr(0, 40)) + ": bad value " + quoted(text);
    for (const RealKey& real : real_keys) {
        if (real.name != key) continue;
        const auto value = to_number<double>(text);
        if (!value || !(*value >= real.minimum && *value <= real.maximum)) return wrong;
        sampling.*real.member = *value;
        return "";
    }
    for (const IntegerKey& integer : integer_keys) {
        if (integer.name != key) continue;
        const auto value = to_number<int64_t>(text);
        if (!value || *value < integer.minimum || *value > integer.maximum) return wrong;
        sampling.*integer.member = *value;
        return "";
    }
    if (key == "logit_bias") return parse_logit_bias(text, limits, sampling);
    if (key == "grammar") return parse_grammar(text, sampling);
    if (key == "seed") {
        const auto value = to_number<uint64_t>(text);
        if (!value) return wrong;
        sampling.seed = *value;
        return "";
    }
    if (key == "resume") {
        const auto value = to_number<int64_t>(text);
        if (!value || *value < 0) return wrong;
        request.resume = *value;
        return "";
    }
    return "unknown key " + quoted(key);
}

std::string parse_generation(std::string_view rest, const Limits& limits, Request& request) {
    const std::string_view max_new_text = take_word(rest);
    const auto max_new = to_number<int64_t>(max_new_text);
    if (!max_new || *max_new < 1) return "max_new: bad value " + quoted(max_new_text);
    request.max_new = *max_new;
    while (true) {
        const std::string_view word = take_word(rest);
        const size_t equals = word.find('=');
        if (equals == std::string_view::npos) {
            if (!rest.empty()) return "ids: expected the ids as the last word";
            const std::string error = parse_ids(word, limits, request.ids);
            if (!error.empty()) return error;
            break;
        }
        const std::string error = parse_option(word.substr(0, equals), word.substr(equals + 1), limits, request);
        if (!error.empty()) return error;
    }
    if (request.resume > int64_t(request.ids.size())) return "resume: more than there are ids";
    return "";
}

}  // namespace

Command parse_command(std::string_view line, const Limits& limits) {
    Command command;
    if (line == "QUIT") {
        command.kind = Command::Kind::quit;
        return command;
    }
    std::string_view rest = line;
    const std::string_view name = take_word(rest);
    const auto rid = to_number<uint32_t>(take_word(rest));
    if (!rid || !(name == "GEN" || name == "EMB" || name == "STOP")) {
        command.error = "ignored a line that is no command: " + quoted(line);
        return command;
    }
    command.request.rid = *rid;
    if (name == "STOP") {
        command.kind = Command::Kind::stop;
    } else if (line.size() > limits.line_bytes) {
        command.error = "line: longer than " + std::to_string(limits.line_bytes) + " bytes";
    } else if (name == "GEN") {
        command.kind = Command::Kind::generate;
        command.error = parse_generation(rest, limits, command.request);
    } else {
        command.kind = Command::Kind::embed;
        command.request.is_embedding = true;
        command.error = parse_ids(rest, limits, command.request.ids);
    }
    if (!command.error.empty()) command.kind = Command::Kind::refused;
    return command;
}

namespace {

void write_tag(Output& out, uint32_t rid) { out << " #" << rid << '\n'; }

void write_ms(Output& out, double ms) { out.number(std::round(ms * 1000) / 1000, 9); }

}  // namespace

void write_resume(Output& out, uint32_t rid, int64_t reused) {
    out << "RESUME " << reused;
    write_tag(out, rid);
}

void write_prompt_progress(Output& out, uint32_t rid, int64_t position, int64_t total, double chunk_ms, int64_t chunk) {
    out << "PP " << position << ' ' << total << ' ';
    write_ms(out, chunk_ms);
    out << ' ';
    out.number(chunk_ms > 0 ? std::round(double(chunk) * 1e4 / chunk_ms) / 10 : 0, 9);
    write_tag(out, rid);
}

void write_reused(Output& out, uint32_t rid, int64_t reused) {
    out << "REUSED " << reused;
    write_tag(out, rid);
}

void write_token(Output& out, uint32_t rid, Token id) {
    out << "T " << id;
    write_tag(out, rid);
}

void write_token(Output& out, uint32_t rid, Token id, float logprob, const std::vector<Alternative>& alternatives) {
    out << "T " << id << ' ';
    out.number(logprob);
    char separator = ' ';
    for (const Alternative& alternative : alternatives) {
        out << separator << alternative.id << ':';
        out.number(alternative.logprob);
        separator = ',';
    }
    write_tag(out, rid);
}

void write_embedding(Output& out, uint32_t rid, const std::vector<float>& embedding) {
    static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire format is little-endian");
    out << "E " << base64_encode(embedding.data(), embedding.size() * sizeof(float));
    write_tag(out, rid);
}

void write_done(Output& out, uint32_t rid, const Summary& summary) {
    out << "DONE " << summary.generated << ' ' << summary.prompt_tokens << ' ';
    write_ms(out, summary.prompt_ms);
    out << ' ';
    write_ms(out, summary.decode_ms);
    // No drafts, no expert cache, no blobs and nothing offloaded: llama.cpp has no notion of them.
    out << ' ' << summary.finish << " 0 0 " << summary.reused << " 0 0 0 0 0 " << summary.prompt_read << " 0";
    write_tag(out, rid);
}

void write_error(Output& out, uint32_t rid, std::string_view text) {
    out << "ERR ";
    for (const char symbol : text) out << (symbol >= 0 && symbol < ' ' ? ' ' : symbol);
    write_tag(out, rid);
}

}  // namespace ringfence

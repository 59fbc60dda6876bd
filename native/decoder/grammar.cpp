#include "grammar.hpp"

#include <cmath>
#include <exception>

namespace ringfence {

namespace {

// llama.cpp's parser recurses into brackets; this bounds its stack.
bool is_nested_too_deeply(const std::string& text) {
    constexpr int most = 500;
    int depth = 0;
    for (const char symbol : text) {
        depth += symbol == '(' ? 1 : symbol == ')' && depth > 0 ? -1 : 0;
        if (depth > most) return true;
    }
    return false;
}

}  // namespace

std::unique_ptr<Grammar> Grammar::parse(const llama_vocab* vocabulary, const std::string& text) {
    if (is_nested_too_deeply(text)) return nullptr;
    try {
        llama_sampler* sampler = llama_sampler_init_grammar(vocabulary, text.c_str(), "root");
        return sampler == nullptr ? nullptr : std::unique_ptr<Grammar>(new Grammar(sampler));
    } catch (const std::exception&) {
        return nullptr;
    }
}

bool Grammar::allows(Token id) {
    llama_token_data candidate{id, 1.0f, 0.0f};
    llama_token_data_array one{&candidate, 1, -1, false};
    llama_sampler_apply(sampler_.get(), &one);
    return !std::isinf(candidate.logit);
}

bool Grammar::accept(Token id) {
    if (!allows(id)) return false;
    try {
        llama_sampler_accept(sampler_.get(), id);
        return true;
    } catch (const std::exception&) {
        return false;
    }
}

void Grammar::mask(std::vector<llama_token_data>& candidates) {
    llama_token_data_array all{candidates.data(), candidates.size(), -1, false};
    llama_sampler_apply(sampler_.get(), &all);
}

}  // namespace ringfence

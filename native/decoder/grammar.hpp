// A GBNF grammar and how far an output has got in it; a thin owner of llama.cpp's grammar sampler.
//
// llama.cpp aborts the process when it is told to accept an end token it does not allow, and throws on others; accept() asks
// first, so a request can end with an error instead.
#pragma once

#include "protocol.hpp"

#include <llama.h>

#include <memory>
#include <string>
#include <vector>

namespace ringfence {

class Grammar {
public:
    // Null if the text is no grammar with a rule called root.
    static std::unique_ptr<Grammar> parse(const llama_vocab* vocabulary, const std::string& text);

    bool allows(Token id);

    // Advances by one token; false if the grammar does not allow it.
    bool accept(Token id);

    // Sets the logit of every candidate that is not allowed to -inf.
    void mask(std::vector<llama_token_data>& candidates);

private:
    struct Free {
        void operator()(llama_sampler* sampler) const { llama_sampler_free(sampler); }
    };
    explicit Grammar(llama_sampler* sampler) : sampler_(sampler) {}

    std::unique_ptr<llama_sampler, Free> sampler_;
};

}  // namespace ringfence

// A loaded model and its decoding context: owners of libllama's objects, and what is announced about them.
#pragma once

#include "options.hpp"

#include <llama.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

namespace ringfence {

struct LoadFailed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct FreeModel {
    void operator()(llama_model* model) const { llama_model_free(model); }
};
struct FreeContext {
    void operator()(llama_context* context) const { llama_free(context); }
};
using ModelPointer = std::unique_ptr<llama_model, FreeModel>;
using ContextPointer = std::unique_ptr<llama_context, FreeContext>;

// Sends llama.cpp's log to standard error: warnings and errors, or all of it.
void start_backend(bool is_verbose);

// Both throw LoadFailed. `progress` is called with whole percents, once each.
ModelPointer load_model(const Options& options, const std::function<void(int)>& progress);
ContextPointer make_context(llama_model* model, const Options& options);

// A few short decodes, so that the first request does not pay for what happens only once. Returns how many tokens more in a
// pass cost as much as another pass: many when reading the weights is what takes the time, none when computing is.
int64_t warm_up(llama_context* context, const llama_vocab* vocabulary, const Options& options);

std::string meta_value(const llama_model* model, const std::string& key);
std::string model_name(const llama_model* model, const std::string& path);  // without blanks
std::string backend_name(const Options& options);                          // cpu, cuda, rocm, vulkan, ...

}  // namespace ringfence

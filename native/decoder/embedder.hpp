// Embeddings of prompts, computed chunk by chunk between the steps of the engine.
//
// It has a context of its own, made at the first request: in an embedding context every token is an output, which the decoding
// context's buffers are not made for. Hidden states are pooled here rather than by libllama, which pools only what one batch
// holds: as the model's metadata says (mean, first or last token), mean without such metadata. The result is normalised to
// length 1.
#pragma once

#include "model.hpp"
#include "protocol.hpp"

#include <deque>
#include <vector>

namespace ringfence {

class Embedder {
public:
    Embedder(llama_model* model, const Options& options) : model_(model), options_(options) {}

    size_t jobs() const { return jobs_.size(); }
    bool is_running(uint32_t rid) const;
    void push(Request request, double now_ms);
    void stop(uint32_t rid);

    // Computes one chunk of the first job, if there is one, and answers it when that was the last.
    void step(Output& out, double now_ms);

private:
    enum class Pooling { mean, first, last };
    struct Job {
        Request request;
        double started_ms;
        size_t position = 0;
        bool is_stopped = false;
        std::vector<double> sum;
    };

    bool open();
    void finish(Output& out, double now_ms, std::string_view finish);
    bool compute(Job& job);
    void pool(Job& job, const float* hidden, size_t index) const;

    llama_model* model_;
    const Options& options_;
    ContextPointer context_;
    Pooling pooling_ = Pooling::mean;
    size_t width_ = 0;
    size_t chunk_ = 0;
    std::deque<Job> jobs_;
};

}  // namespace ringfence

#include "embedder.hpp"

#include <algorithm>
#include <cmath>

namespace ringfence {

namespace {
constexpr size_t chunk_tokens = 64;  // a logit row is computed for each as well: keep that small
}

bool Embedder::is_running(uint32_t rid) const {
    return std::any_of(jobs_.begin(), jobs_.end(), [rid](const Job& job) { return job.request.rid == rid; });
}

void Embedder::push(Request request, double now_ms) { jobs_.push_back({std::move(request), now_ms, 0, false, {}}); }

void Embedder::stop(uint32_t rid) {
    for (Job& job : jobs_) {
        if (job.request.rid == rid) job.is_stopped = true;
    }
}

bool Embedder::open() {
    if (context_) return true;
    const std::string architecture = meta_value(model_, "general.architecture");
    const std::string pooling = meta_value(model_, architecture + ".pooling_type");
    const bool is_causal = meta_value(model_, architecture + ".attention.causal") != "false";
    pooling_ = pooling == "2" ? Pooling::first : pooling == "3" ? Pooling::last : Pooling::mean;
    width_ = size_t(llama_model_n_embd_out(model_));
    // Attention that looks ahead needs the whole prompt at once.
    chunk_ = is_causal ? std::min(chunk_tokens, size_t(options_.context)) : size_t(options_.context);

    llama_context_params parameters = llama_context_default_params();
    parameters.n_ctx = uint32_t(options_.context);
    parameters.n_seq_max = 1;
    parameters.n_batch = parameters.n_ubatch = uint32_t(chunk_);
    parameters.n_threads = int32_t(options_.threads);
    parameters.n_threads_batch = int32_t(options_.threads_batch);
    parameters.pooling_type = LLAMA_POOLING_TYPE_NONE;
    parameters.embeddings = true;
    parameters.no_perf = true;
    context_.reset(llama_init_from_model(model_, parameters));
    return context_ != nullptr;
}

void Embedder::step(Output& out, double now_ms) {
    if (jobs_.empty()) return;
    Job& job = jobs_.front();
    if (job.is_stopped) {
        finish(out, now_ms, "cancel");
    } else if (!open()) {
        write_error(out, job.request.rid, "embeddings: no context could be made; free memory or lower --context");
        jobs_.pop_front();
    } else if (!compute(job)) {
        write_error(out, job.request.rid, "embeddings: the computation failed; see the decoder's log");
        jobs_.pop_front();
    } else if (job.position < job.request.ids.size()) {
        write_prompt_progress(out, job.request.rid, int64_t(job.position), int64_t(job.request.ids.size()), 0, 0);
    } else {
        double square = 0;
        for (const double value : job.sum) square += value * value;
        std::vector<float> embedding(width_);
        const double length = square > 0 ? std::sqrt(square) : 1;
        std::transform(job.sum.begin(), job.sum.end(), embedding.begin(), [&](double x) { return float(x / length); });
        if (std::isfinite(square)) {
            write_embedding(out, job.request.rid, embedding);
            finish(out, now_ms, "stop");
        } else {
            finish(out, now_ms, "nonfinite");
        }
    }
}

bool Embedder::compute(Job& job) {
    std::vector<Token>& ids = job.request.ids;
    if (job.position == 0) {
        if (llama_memory_t memory = llama_get_memory(context_.get())) llama_memory_clear(memory, false);
        job.sum.assign(width_, 0);
    }
    const size_t count = std::min(chunk_, ids.size() - job.position);
    // batch_get_one continues at the sequence's last position; its tokens are all outputs in an embedding context, and saying
    // so here would only save a warning.
    llama_batch batch = llama_batch_get_one(ids.data() + job.position, int32_t(count));
    std::vector<int8_t> outputs(count, 1);
    batch.logits = outputs.data();
    if (llama_decode(context_.get(), batch) != 0) return false;
    for (size_t i = 0; i < count; ++i) {
        const float* hidden = llama_get_embeddings_ith(context_.get(), int32_t(i));
        if (hidden == nullptr) return false;
        pool(job, hidden, job.position + i);
    }
    job.position += count;
    return true;
}

void Embedder::pool(Job& job, const float* hidden, size_t index) const {
    const bool is_taken = pooling_ == Pooling::mean || (pooling_ == Pooling::first && index == 0) ||
                          (pooling_ == Pooling::last && index + 1 == job.request.ids.size());
    for (size_t i = 0; is_taken && i < width_; ++i) job.sum[i] += double(hidden[i]);
}

void Embedder::finish(Output& out, double now_ms, std::string_view finish) {
    const Job& job = jobs_.front();
    Summary summary;
    summary.prompt_tokens = int64_t(job.request.ids.size());
    summary.prompt_ms = now_ms - job.started_ms;
    summary.prompt_read = int64_t(job.position);
    summary.finish = finish;
    write_done(out, job.request.rid, summary);
    jobs_.pop_front();
}

}  // namespace ringfence

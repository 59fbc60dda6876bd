#include "model.hpp"

#include <ggml-backend.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <vector>

namespace ringfence {

namespace {

struct NamedType {
    const char* name;
    ggml_type type;
};
constexpr NamedType kv_types[] = {
    {"f16", GGML_TYPE_F16},   {"bf16", GGML_TYPE_BF16}, {"f32", GGML_TYPE_F32},   {"q8_0", GGML_TYPE_Q8_0},
    {"q5_1", GGML_TYPE_Q5_1}, {"q5_0", GGML_TYPE_Q5_0}, {"q4_1", GGML_TYPE_Q4_1}, {"q4_0", GGML_TYPE_Q4_0},
};

ggml_type kv_type_of(const std::string& name) {
    for (const NamedType& entry : kv_types) {
        if (name == entry.name) return entry.type;
    }
    throw BadOption("--kv-type=" + name + " is unknown; use f16, bf16, f32, q8_0, q5_1, q5_0, q4_1 or q4_0");
}

llama_flash_attn_type flash_attention_of(const Options& options) {
    if (options.flash_attention == "on") return LLAMA_FLASH_ATTN_TYPE_ENABLED;
    if (options.flash_attention == "off") return LLAMA_FLASH_ATTN_TYPE_DISABLED;
    if (options.flash_attention == "auto") return LLAMA_FLASH_ATTN_TYPE_AUTO;
    throw BadOption("--flash-attention=" + options.flash_attention + " is unknown; use on, off or auto");
}

void log_to_stderr(ggml_log_level level, const char* text, void* user_data) {
    static ggml_log_level last = GGML_LOG_LEVEL_INFO;
    if (level == GGML_LOG_LEVEL_CONT) level = last;
    last = level;
    const bool is_verbose = user_data != nullptr;
    if (is_verbose || level == GGML_LOG_LEVEL_WARN || level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
}

struct Progress {
    const std::function<void(int)>& report;
    int last = -1;
};

bool on_progress(float fraction, void* user_data) {
    auto& progress = *static_cast<Progress*>(user_data);
    const int percent = int(fraction * 100);
    if (percent > progress.last) {
        progress.last = percent;
        progress.report(percent);
    }
    return true;
}

// Newer versions of libllama reserve logits for every token of a batch unless told how many outputs there will be.
template <typename Parameters>
auto limit_outputs(Parameters& parameters, uint32_t outputs, int) -> decltype(parameters.n_outputs_max, void()) {
    parameters.n_outputs_max = outputs;
}
template <typename Parameters>
void limit_outputs(Parameters&, uint32_t, long) {}

bool is_gpu(ggml_backend_dev_t device) {
    const auto type = ggml_backend_dev_type(device);
    return type != GGML_BACKEND_DEVICE_TYPE_CPU && type != GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

}  // namespace

void start_backend(bool is_verbose) {
    static bool verbose = true;
    llama_log_set(log_to_stderr, is_verbose ? &verbose : nullptr);
    ggml_backend_load_all();
    llama_backend_init();
}

ModelPointer load_model(const Options& options, const std::function<void(int)>& progress) {
    kv_type_of(options.kv_type);  // complain before the long part
    flash_attention_of(options);
    Progress state{progress};
    llama_model_params parameters = llama_model_default_params();
    parameters.n_gpu_layers = options.gpu_layers < 0 ? 999 : int32_t(options.gpu_layers);
    parameters.progress_callback = on_progress;
    parameters.progress_callback_user_data = &state;
    ModelPointer model(llama_model_load_from_file(options.model.c_str(), parameters));
    if (!model) {
        throw LoadFailed("--model=" + options.model + ": libllama could not load it; its messages are above");
    }
    if (llama_model_has_encoder(model.get()) || !llama_model_has_decoder(model.get())) {
        throw LoadFailed("--model=" + options.model + ": not a decoder-only model; use a generative one");
    }
    return model;
}

ContextPointer make_context(llama_model* model, const Options& options) {
    constexpr int64_t cell_padding = 256;  // libllama rounds a sequence's cells up to it
    const int64_t cells_of_slot = (options.context + cell_padding - 1) / cell_padding * cell_padding;
    llama_context_params parameters = llama_context_default_params();
    parameters.kv_unified = options.is_kv_shared();
    parameters.n_ctx = uint32_t(options.is_kv_shared() ? options.kv_cells : cells_of_slot * options.slots);
    parameters.n_seq_max = uint32_t(options.slots);
    parameters.n_batch = uint32_t(options.batch);
    parameters.n_ubatch = uint32_t(options.ubatch);
    parameters.n_threads = int32_t(options.threads);
    parameters.n_threads_batch = int32_t(options.threads_batch);
    parameters.type_k = parameters.type_v = kv_type_of(options.kv_type);
    parameters.flash_attn_type = flash_attention_of(options);
    parameters.swa_full = !options.small_swa;
    parameters.no_perf = true;
    limit_outputs(parameters, uint32_t(options.slots), 0);
    ContextPointer context(llama_init_from_model(model, parameters));
    if (!context || llama_get_memory(context.get()) == nullptr) {
        throw LoadFailed("no context of " + std::to_string(options.slots) + " slots of " + std::to_string(options.context) +
                         " tokens could be made; lower --slots or --context, or use --kv-type q8_0 or --small-swa");
    }
    return context;
}

namespace {

// Milliseconds of a pass over `sequences` sequences with one token each; the best of three.
double time_pass(llama_context* context, llama_token token, int32_t sequences) {
    llama_batch batch = llama_batch_init(sequences, 0, 1);
    batch.n_tokens = sequences;
    double best_ms = 1e9;
    for (int repetition = 0; repetition < 3; ++repetition) {
        for (int32_t i = 0; i < sequences; ++i) {
            batch.token[i] = token;
            batch.pos[i] = repetition;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = i;
            batch.logits[i] = 1;
        }
        const int64_t started_us = llama_time_us();
        llama_decode(context, batch);
        llama_synchronize(context);
        best_ms = std::min(best_ms, double(llama_time_us() - started_us) / 1000);
    }
    llama_batch_free(batch);
    llama_memory_clear(llama_get_memory(context), true);
    return best_ms;
}

}  // namespace

int64_t warm_up(llama_context* context, const llama_vocab* vocabulary, const Options& options) {
    const llama_token bos = llama_vocab_bos(vocabulary);
    const llama_token token = bos == LLAMA_TOKEN_NULL ? 0 : bos;
    const double one_ms = time_pass(context, token, 1);
    const auto many = int32_t(std::min<int64_t>(options.slots, 8));
    if (many < 3) return 0;  // two slots have no gap between them
    const double token_ms = std::max(1e-6, (time_pass(context, token, many) - one_ms) / (many - 1));
    return int64_t(std::clamp((one_ms - token_ms) / token_ms, 0.0, 256.0));
}

std::string meta_value(const llama_model* model, const std::string& key) {
    char text[256] = "";
    return llama_model_meta_val_str(model, key.c_str(), text, sizeof text) >= 0 ? text : "";
}

std::string model_name(const llama_model* model, const std::string& path) {
    std::string name = meta_value(model, "general.name");
    if (name.empty()) {
        name = path.substr(path.find_last_of('/') + 1);
        name = name.substr(0, name.rfind(".gguf"));
    }
    std::replace_if(name.begin(), name.end(), [](unsigned char c) { return std::isspace(c) || std::iscntrl(c); }, '-');
    return name;
}

std::string backend_name(const Options& options) {
    for (size_t i = 0; options.gpu_layers != 0 && i < ggml_backend_dev_count(); ++i) {
        const ggml_backend_dev_t device = ggml_backend_dev_get(i);
        if (!is_gpu(device)) continue;
        std::string name = ggml_backend_reg_name(ggml_backend_dev_backend_reg(device));
        std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return char(std::tolower(c)); });
        return name;
    }
    return "cpu";
}

}  // namespace ringfence

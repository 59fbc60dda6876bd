// ringfence-decoder: generates tokens with libllama for one worker. See docs/decoder.md.
#include "engine.hpp"
#include "lifetime.hpp"

#include <cstdio>
#include <malloc.h>
#include <unistd.h>

namespace ringfence {

namespace {

constexpr int exit_bad_option = 2;
constexpr int stdin_grace_ms = 300;

// libllama allocates and frees blocks of hundreds of kilobytes in every step. By default each would be mapped and unmapped
// again, at a page fault for every 4 KiB.
void keep_freed_memory() {
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
    mallopt(M_TRIM_THRESHOLD, 256 << 20);
#endif
}

void announce(Output& out, const llama_model* model, const Options& options) {
    const int64_t cells = options.is_kv_shared() ? options.kv_cells : options.context * options.slots;
    out << "INFO vocab=" << llama_vocab_n_tokens(llama_model_get_vocab(model))
        << " model=" << model_name(model, options.model) << " backend=" << backend_name(options) << " kv_cells=" << cells
        << " logprobs=" << max_logprobs << " grammar=1 logit_bias=1 embeddings=1 resume=1"
        << " engine=ringfence-" RINGFENCE_VERSION "/llama.cpp-" LLAMA_PACKAGE_VERSION "\n";
    out << "READY " << options.context << " stop slots=" << options.slots << '\n';
    out.flush();
}

void serve(const Options& options) {
    Output out(STDOUT_FILENO);
    Input input(STDIN_FILENO, max_line_bytes(options));
    start_backend(options.verbose);
    const ModelPointer model = load_model(options, [&out](int percent) {
        out << "INFO load=" << percent << '\n';
        out.flush();
    });
    const ContextPointer context = make_context(model.get(), options);
    const int64_t paying_gap = warm_up(context.get(), llama_model_get_vocab(model.get()), options);
    const int64_t fill_gaps = options.fill_gaps >= 0 ? options.fill_gaps : paying_gap;
    std::fprintf(stderr, "fill_gaps=%lld\n", static_cast<long long>(fill_gaps));
    announce(out, model.get(), options);
    Engine(model.get(), context.get(), options, fill_gaps, input, out).run();
    _exit(0);  // the system frees memory faster than we would, and nothing is left to be saved
}

int main(int argc, char** argv) {
    try {
        const Options options = parse_options(argc, argv);
        if (options.help) {
            std::fputs(help_text().c_str(), stdout);
            return 0;
        }
        bind_to_parent();
        keep_freed_memory();
        watch_stdin(stdin_grace_ms);
        serve(options);
    } catch (const BadOption& error) {
        std::fprintf(stderr, "ringfence-decoder: %s\n", error.what());
        return exit_bad_option;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "ringfence-decoder: %s\n", error.what());
        return 1;
    }
    return 0;
}

}  // namespace

}  // namespace ringfence

int main(int argc, char** argv) { return ringfence::main(argc, argv); }

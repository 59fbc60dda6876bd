#include "options.hpp"

#include <charconv>
#include <cmath>
#include <string_view>
#include <thread>
#include <variant>
#include <vector>

namespace ringfence {

namespace {

struct Integer {
    int64_t Options::*member;
    int64_t minimum, maximum;
};
struct Real {
    double Options::*member;
    double minimum, maximum;
};
struct Text {
    std::string Options::*member;
};
struct Flag {
    bool Options::*member;
};

struct Entry {
    std::string_view name, value, help;
    std::variant<Integer, Real, Text, Flag> target;
};

const std::vector<Entry>& entries() {
    constexpr int64_t million = 1'000'000;
    static const std::vector<Entry> table{
        {"--model", "PATH", "the GGUF file (required)", Text{&Options::model}},
        {"--context", "N", "context of each request in tokens, announced by READY; default 4096",
         Integer{&Options::context, 8, 100 * million}},
        {"--slots", "N", "requests that run at once; default 4", Integer{&Options::slots, 1, 256}},
        {"--threads", "N", "threads of a decode step; default 0: one for each processor we may run on",
         Integer{&Options::threads, 0, 1024}},
        {"--threads-batch", "N", "threads of a step that reads a prompt; default 0: as --threads",
         Integer{&Options::threads_batch, 0, 1024}},
        {"--gpu-layers", "N", "layers kept on the GPU; default -1: all of them if libllama has a GPU backend",
         Integer{&Options::gpu_layers, -1, million}},
        {"--kv-type", "TYPE", "type of the KV cache: f16, bf16, f32, q8_0, q5_1, q5_0, q4_1, q4_0; default f16",
         Text{&Options::kv_type}},
        {"--flash-attention", "MODE", "fused attention: on, off, or auto (on where the backend has it); default auto",
         Text{&Options::flash_attention}},
        {"--kv-cells", "N",
         "one KV cache of N cells shared by all slots (prefixes are shared without a copy, idle prefixes are dropped when "
         "it is full); default 0: each slot has its own of --context cells, which decodes faster",
         Integer{&Options::kv_cells, 0, 1000 * million}},
        {"--batch", "N", "most tokens of one step; default 2048", Integer{&Options::batch, 1, million}},
        {"--ubatch", "N", "most tokens the backend computes at once, and of a prompt chunk read alone; default 512",
         Integer{&Options::ubatch, 1, million}},
        {"--prompt-chunk", "N", "most prompt tokens a step takes while other requests stream; default 256",
         Integer{&Options::prompt_chunk, 1, million}},
        {"--pace", "X",
         "a step that also reads a prompt may take X times a pure decode step; fewer prompt tokens are taken when it would "
         "take longer; default 2.5; 0: always --prompt-chunk tokens",
         Real{&Options::pace, 0, 1000}},
        {"--fill-gaps", "N",
         "libllama computes only neighbouring slots together; up to N idle slots between running ones are filled with a token "
         "that is discarded, to save a pass; default -1: as many as pay, measured at the start",
         Integer{&Options::fill_gaps, -1, 256}},
        {"--small-swa", "", "keep only the window of sliding-window layers: less memory, and prefixes are re-read more often",
         Flag{&Options::small_swa}},
        {"--exact", "",
         "keep results independent of what else runs, as far as libllama can: KV cache in f32 and no fused attention; slower",
         Flag{&Options::exact}},
        {"--verbose", "", "the whole log of llama.cpp on standard error, not only its warnings", Flag{&Options::verbose}},
        {"--help", "", "this text", Flag{&Options::help}},
    };
    return table;
}

template <typename Number>
Number parse_number(const Entry& entry, std::string_view text, Number minimum, Number maximum) {
    Number value{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool is_number = error == std::errc() && end == text.data() + text.size();
    if (!is_number || !(value >= minimum && value <= maximum)) {
        throw BadOption(std::string(entry.name) + "=" + std::string(text) + ": expected a number from " +
                        std::to_string(minimum) + " to " + std::to_string(maximum));
    }
    return value;
}

void assign(Options& options, const Entry& entry, std::string_view text) {
    if (const auto* integer = std::get_if<Integer>(&entry.target)) {
        options.*integer->member = parse_number(entry, text, integer->minimum, integer->maximum);
    } else if (const auto* real = std::get_if<Real>(&entry.target)) {
        options.*real->member = parse_number(entry, text, real->minimum, real->maximum);
    } else if (const auto* string = std::get_if<Text>(&entry.target)) {
        options.*string->member = text;
    }
}

const Entry& find_entry(std::string_view name) {
    for (const Entry& entry : entries()) {
        if (entry.name == name) return entry;
    }
    throw BadOption("unknown option '" + std::string(name) + "'; --help lists all of them");
}

void complete(Options& options) {
    if (options.model.empty()) throw BadOption("--model is missing; give the path of a GGUF file");
    if (options.exact) {
        options.kv_type = "f32";  // fused attention works in f16 whatever the cache's type
        options.flash_attention = "off";
    }
    if (options.threads == 0) options.threads = std::max(1u, std::thread::hardware_concurrency());
    if (options.threads_batch == 0) options.threads_batch = options.threads;
    options.ubatch = std::min(options.ubatch, options.batch);
    options.batch = std::max(options.batch, options.slots + options.prompt_chunk);
    if (options.is_kv_shared() && options.kv_cells < options.context) {
        throw BadOption("--kv-cells=" + std::to_string(options.kv_cells) + " is less than --context=" +
                        std::to_string(options.context) + "; give at least the context, or 0 for separate caches");
    }
}

}  // namespace

Options parse_options(int argc, char** argv) {
    Options options;
    for (int i = 1; i < argc; ++i) {
        const std::string_view argument = argv[i];
        const size_t equals = argument.find('=');
        const Entry& entry = find_entry(argument.substr(0, equals));
        if (const auto* flag = std::get_if<Flag>(&entry.target)) {
            options.*flag->member = true;
        } else if (equals != std::string_view::npos) {
            assign(options, entry, argument.substr(equals + 1));
        } else if (i + 1 < argc) {
            assign(options, entry, argv[++i]);
        } else {
            throw BadOption(std::string(entry.name) + " needs a value: " + std::string(entry.help));
        }
    }
    if (!options.help) complete(options);
    return options;
}

std::string help_text() {
    std::string text =
        "usage: ringfence-decoder --model PATH [options]\n\n"
        "Generates tokens with libllama for one worker, over standard input and output (tagged dialect of the decoder\n"
        "protocol). Standard error is its log.\n\n";
    for (const Entry& entry : entries()) {
        std::string left = "  " + std::string(entry.name) + " " + std::string(entry.value);
        left.resize(std::max<size_t>(left.size() + 1, 22), ' ');
        text += left + std::string(entry.help) + "\n";
    }
    return text;
}

}  // namespace ringfence

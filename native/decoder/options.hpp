// Command line of ringfence-decoder.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace ringfence {

struct Options {
    std::string model;
    int64_t context = 4096;
    int64_t slots = 4;
    int64_t threads = 0;
    int64_t threads_batch = 0;
    int64_t gpu_layers = -1;
    std::string kv_type = "f16";
    std::string flash_attention = "auto";
    int64_t kv_cells = 0;
    int64_t batch = 2048;
    int64_t ubatch = 512;
    int64_t prompt_chunk = 256;
    double pace = 2.5;
    int64_t fill_gaps = -1;
    bool small_swa = false;
    bool exact = false;
    bool verbose = false;
    bool help = false;

    bool is_kv_shared() const { return kv_cells > 0; }
};

// A message that names the option, the value and the remedy.
struct BadOption : std::runtime_error {
    using std::runtime_error::runtime_error;
};

Options parse_options(int argc, char** argv);  // throws BadOption
std::string help_text();

}  // namespace ringfence

// The step loop: N slots, one llama_decode a step.
//
//   commands -> admission -> [ decode tokens of all streaming slots | a chunk of the prompts being read ] -> sampling -> lines
//
// Invariants
// - A slot is a sequence of libllama's memory: slot i owns sequence i. Its `cells` are exactly the tokens whose keys and values
//   that sequence holds, at positions 0, 1, 2, ...; a free slot keeps them as cache for the next request.
// - While a request streams, `pending` is the one token sampled but not yet in `cells`.
// - A request ends with one DONE or one ERR, and its slot is free from then on.
// - Only this thread touches libllama, the slots and the output; commands are read between steps and never waited for while
//   something runs. An idle engine sleeps in poll().
#pragma once

#include "admission.hpp"
#include "embedder.hpp"
#include "grammar.hpp"
#include "input.hpp"
#include "model.hpp"
#include "output.hpp"
#include "pace.hpp"
#include "protocol.hpp"
#include "sampler.hpp"

#include <chrono>
#include <memory>
#include <vector>

namespace ringfence {

struct Slot {
    enum class Phase { free, reading, streaming };
    Phase phase = Phase::free;
    std::vector<Token> cells;
    uint64_t last_used = 0;

    Request request;
    std::unique_ptr<Grammar> grammar;
    uint64_t seed = 0;
    uint64_t admitted = 0;  // order of admission
    Token pending = -1;
    int64_t reused = 0;
    int64_t prompt_read = 0;
    int64_t generated = 0;
    double started_ms = 0;
    double first_token_ms = 0;
    bool is_stopped = false;
    bool drop_at_end = false;  // its state may be poisoned: don't keep it as cache
    int32_t taken = 0;         // of its tokens in the current batch
    bool is_filling = false;   // a discarded token of it is in the current batch
    int32_t output = -1;       // index in the current batch whose logits are wanted; -1: none

    bool is_free() const { return phase == Phase::free; }
};

class Engine {
public:
    // fill_gaps: idle slots between running ones that are worth a discarded token, see fill_gap().
    Engine(llama_model* model, llama_context* context, const Options& options, int64_t fill_gaps, Input& input,
           Output& output);
    ~Engine();
    Engine(const Engine&) = delete;

    // Until QUIT or the end of the input.
    void run();

private:
    // commands.cpp: what a command does
    bool handle_commands();  // false: leave
    void handle(Command& command);
    void start(Request& request);
    std::string refusal(const Request& request);
    std::unique_ptr<Grammar> make_grammar(const Request& request, std::string& error) const;
    void stop(uint32_t rid);
    void place(Slot& slot, const Admission& admission);
    int64_t reuse(int index, const Admission& admission);

    // engine.cpp: steps
    size_t running() const;
    void step();
    void end_stopped();
    int64_t take_streams();
    int64_t take_prompts(int64_t decode_tokens);
    void fill_batch();
    void fill_gap(int begin, int end);
    void add(Token id, int64_t position, int slot, bool has_output);
    void add_taken(Slot& slot);
    bool decode();
    void discard_filling();
    bool make_room();
    void advance(double step_ms);
    void sample(Slot& slot);
    void end(Slot& slot, std::string_view finish);
    void fail(Slot& slot, std::string_view error);
    void release(Slot& slot);
    void drop(Slot& slot);
    void drop_everything();
    int index_of_slot(const Slot& slot) const { return int(&slot - slots_.data()); }
    double now_ms() const;

    // telling how it goes
    void tell_status();
    int idle_timeout_ms() const;

    llama_model* model_;
    llama_context* context_;
    llama_memory_t memory_;
    const llama_vocab* vocabulary_;
    const Options& options_;
    Input& input_;
    Output& out_;
    Limits limits_;
    AdmissionRules rules_;
    Sampler sampler_;
    Embedder embedder_;
    Pace pace_;
    int64_t fill_gaps_;
    llama_batch batch_;
    std::vector<Slot> slots_;
    uint64_t clock_ = 0;  // counts admissions and releases
    int64_t steps_ = 0;
    double status_told_ms_ = 0;
    bool is_status_due_ = false;  // something ran since the last STAT
    std::chrono::steady_clock::time_point epoch_ = std::chrono::steady_clock::now();
};

size_t max_line_bytes(const Options& options);

}  // namespace ringfence

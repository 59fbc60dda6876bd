// The engine's commands: admission of requests, STOP, QUIT.
#include "engine.hpp"

#include <algorithm>
#include <cstdio>
#include <random>

namespace ringfence {

namespace {

uint64_t random_seed() {
    std::random_device device;
    return uint64_t(device()) << 32 | device();
}

}  // namespace

size_t max_line_bytes(const Options& options) {
    constexpr size_t bytes_per_id = 12, options_bytes = 4 << 20;  // a grammar of 1 MiB in base64, and biases
    return size_t(options.context) * bytes_per_id + options_bytes;
}

bool Engine::handle_commands() {
    input_.poll(running() + embedder_.jobs() > 0 ? 0 : idle_timeout_ms());
    while (const auto line = input_.next_line()) {
        Command command = parse_command(*line, limits_);
        if (command.kind == Command::Kind::quit) return false;
        handle(command);
    }
    return !input_.is_at_end();
}

void Engine::handle(Command& command) {
    switch (command.kind) {
        case Command::Kind::generate:
        case Command::Kind::embed: start(command.request); break;
        case Command::Kind::stop: stop(command.request.rid); break;
        case Command::Kind::refused: write_error(out_, command.request.rid, command.error); break;
        case Command::Kind::garbage: std::fprintf(stderr, "%s\n", command.error.c_str()); break;
        case Command::Kind::quit: break;
    }
}

void Engine::stop(uint32_t rid) {
    embedder_.stop(rid);
    for (Slot& slot : slots_) {
        if (!slot.is_free() && slot.request.rid == rid) slot.is_stopped = true;
    }
}

// Empty, or why the request can't start.
std::string Engine::refusal(const Request& request) {
    if (running() + embedder_.jobs() >= slots_.size()) return "busy";
    const int64_t room = options_.context - (request.is_embedding ? 0 : 1);
    if (int64_t(request.ids.size()) > room) {
        return "context: a prompt of " + std::to_string(request.ids.size()) + " tokens does not fit the context of " +
               std::to_string(options_.context);
    }
    return "";
}

void Engine::start(Request& request) {
    const uint32_t rid = request.rid;
    const bool is_known = embedder_.is_running(rid) || std::any_of(slots_.begin(), slots_.end(), [rid](const Slot& slot) {
                              return !slot.is_free() && slot.request.rid == rid;
                          });
    if (is_known) {  // an ERR would be read as the end of the running one
        std::fprintf(stderr, "ignored a second request with the id of a running one: %u\n", rid);
        return;
    }
    std::string error = refusal(request);
    std::unique_ptr<Grammar> grammar;
    if (error.empty()) grammar = make_grammar(request, error);
    if (!error.empty()) return write_error(out_, rid, error);
    if (request.is_embedding) return embedder_.push(std::move(request), now_ms());

    std::vector<SlotView> views;
    for (const Slot& slot : slots_) views.push_back({&slot.cells, slot.is_free(), slot.last_used});
    const Admission admission = admit(views, request.ids, rules_);
    Slot& slot = slots_[size_t(admission.slot)];
    slot.request = std::move(request);
    slot.grammar = std::move(grammar);
    place(slot, admission);
}

// Null without a grammar; otherwise one that has accepted the resumed tokens.
std::unique_ptr<Grammar> Engine::make_grammar(const Request& request, std::string& error) const {
    if (request.sampling.grammar.empty()) return nullptr;
    std::unique_ptr<Grammar> grammar = Grammar::parse(vocabulary_, request.sampling.grammar);
    if (!grammar) {
        error = "grammar: not a valid GBNF grammar with a rule 'root'; the decoder's log says where";
        return nullptr;
    }
    for (auto id = request.ids.end() - request.resume; id != request.ids.end(); ++id) {
        if (!grammar->accept(*id)) {
            error = "grammar: the resumed tokens do not follow it";
            return nullptr;
        }
    }
    return grammar;
}

void Engine::place(Slot& slot, const Admission& admission) {
    slot.phase = Slot::Phase::reading;
    slot.admitted = ++clock_;
    slot.seed = slot.request.sampling.seed != 0 ? slot.request.sampling.seed : random_seed();
    slot.pending = -1;
    slot.generated = slot.prompt_read = 0;
    slot.is_stopped = slot.drop_at_end = false;
    slot.started_ms = slot.first_token_ms = now_ms();
    slot.reused = reuse(admission.slot, admission);
    slot.cells.assign(slot.request.ids.begin(), slot.request.ids.begin() + slot.reused);
    slot.cells.reserve(size_t(options_.context));
    if (slot.reused > 0) write_resume(out_, slot.request.rid, slot.reused);
}

// Makes the slot's sequence hold exactly the first tokens of its prompt, as many as can be had; returns how many.
int64_t Engine::reuse(int index, const Admission& admission) {
    int64_t kept = admission.reused;
    if (admission.source >= 0) {
        llama_memory_seq_rm(memory_, index, -1, -1);
        // Separate caches can only be copied whole; shared cells are merely marked.
        llama_memory_seq_cp(memory_, admission.source, index, options_.is_kv_shared() ? 0 : -1,
                            options_.is_kv_shared() ? llama_pos(kept) : -1);
    }
    if (kept > 0 && !llama_memory_seq_rm(memory_, index, llama_pos(kept), -1)) kept = 0;
    // A sliding window may have moved past the cells that the next token looks at.
    const llama_pos first = llama_memory_seq_pos_min(memory_, index);
    if (kept > 0 && (first < 0 || first > std::max<int64_t>(0, kept - llama_model_n_swa(model_)))) kept = 0;
    if (kept == 0) llama_memory_seq_rm(memory_, index, -1, -1);
    return kept;
}

}  // namespace ringfence

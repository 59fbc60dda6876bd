#include "engine.hpp"

#include <algorithm>
#include <cstdio>

namespace ringfence {

namespace {

constexpr int64_t short_prompt_tokens = 512;
constexpr int64_t min_long_tokens = 8;  // of a step: a long prompt gets on beside any number of short ones

int64_t unread(const Slot& slot) { return int64_t(slot.request.ids.size() - slot.cells.size()); }

// A copy between separate caches moves all their cells, so it must be worth it.
AdmissionRules rules_for(const llama_model* model, const Options& options) {
    const bool is_recurrent = llama_model_is_recurrent(model) || llama_model_is_hybrid(model);
    return {!is_recurrent, options.is_kv_shared() ? 1 : std::max<int64_t>(16, options.context / 256)};
}

}  // namespace

Engine::Engine(llama_model* model, llama_context* context, const Options& options, int64_t fill_gaps, Input& input,
               Output& output)
    : model_(model),
      context_(context),
      memory_(llama_get_memory(context)),
      vocabulary_(llama_model_get_vocab(model)),
      options_(options),
      input_(input),
      out_(output),
      limits_{llama_vocab_n_tokens(vocabulary_), max_line_bytes(options)},
      rules_(rules_for(model, options)),
      sampler_(size_t(limits_.vocabulary)),
      embedder_(model, options),
      pace_(options.pace, options.prompt_chunk),
      fill_gaps_(rules_.can_copy && !options.is_kv_shared() ? fill_gaps : 0),
      batch_(llama_batch_init(int32_t(options.batch), 0, 1)),
      slots_(size_t(options.slots)) {}

Engine::~Engine() { llama_batch_free(batch_); }

void Engine::run() {
    while (handle_commands()) {
        if (running() > 0) step();
        embedder_.step(out_, now_ms());
        tell_status();
        out_.flush();
    }
    out_.flush();
}

double Engine::now_ms() const {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - epoch_).count();
}

size_t Engine::running() const {
    return size_t(std::count_if(slots_.begin(), slots_.end(), [](const Slot& slot) { return !slot.is_free(); }));
}

void Engine::step() {
    end_stopped();
    const double started_ms = now_ms();
    int64_t decode_tokens, prompt_tokens;
    do {
        decode_tokens = take_streams();
        prompt_tokens = take_prompts(decode_tokens);
        if (decode_tokens + prompt_tokens == 0) return;
        fill_batch();
    } while (!decode());
    const double step_ms = now_ms() - started_ms;
    pace_.on_step(step_ms, decode_tokens, prompt_tokens);
    ++steps_;
    is_status_due_ = true;
    advance(step_ms);
}

void Engine::end_stopped() {
    for (Slot& slot : slots_) {
        if (!slot.is_free() && slot.is_stopped) end(slot, "cancel");
    }
}

int64_t Engine::take_streams() {
    int64_t count = 0;
    for (Slot& slot : slots_) {
        slot.taken = slot.phase == Slot::Phase::streaming ? 1 : 0;
        count += slot.taken;
    }
    return count;
}

// Prompts of which little is left go first, with a budget of their own, so that none waits behind a long one; then the others
// with what the pace leaves, and a few tokens always. Within each, in order of admission.
int64_t Engine::take_prompts(int64_t decode_tokens) {
    std::vector<Slot*> readers;
    for (Slot& slot : slots_) {
        if (slot.phase == Slot::Phase::reading) readers.push_back(&slot);
    }
    std::sort(readers.begin(), readers.end(), [](const Slot* a, const Slot* b) {
        const bool is_long_a = unread(*a) > short_prompt_tokens, is_long_b = unread(*b) > short_prompt_tokens;
        return is_long_a != is_long_b ? is_long_b : a->admitted < b->admitted;
    });
    const int64_t room = options_.batch - options_.slots;
    const int64_t alone = options_.ubatch;
    int64_t count = 0, short_count = 0;
    for (Slot* slot : readers) {
        const bool is_long = unread(*slot) > short_prompt_tokens;
        const int64_t paced = is_long ? std::max(pace_.budget_tokens(), short_count + min_long_tokens)
                                      : pace_.short_budget_tokens();
        const int64_t budget = std::max<int64_t>(1, std::min(room, decode_tokens > 0 ? paced : alone));
        slot->taken = int32_t(std::max<int64_t>(0, std::min(budget - count, unread(*slot))));
        count += slot->taken;
        if (!is_long) short_count = count;
    }
    return count;
}

// In the order of slots: libllama computes slots i, i + 1, i + 2, ... in one pass, but a slot that is missing in between
// begins another.
void Engine::fill_batch() {
    batch_.n_tokens = 0;
    int previous = -1;
    for (int i = 0; i < int(slots_.size()); ++i) {
        Slot& slot = slots_[size_t(i)];
        slot.is_filling = false;
        slot.output = -1;
        if (slot.taken == 0) continue;
        if (previous >= 0) fill_gap(previous + 1, i);
        add_taken(slot);
        previous = i;
    }
}

// Puts a token that is discarded afterwards into every slot of [begin, end), if that is worth the pass it saves.
void Engine::fill_gap(int begin, int end) {
    if (end - begin > fill_gaps_) return;
    const auto has_room = [this](const Slot& slot) { return slot.cells.size() < llama_n_ctx_seq(context_); };
    if (!std::all_of(slots_.begin() + begin, slots_.begin() + end, has_room)) return;
    for (int i = begin; i < end; ++i) {
        Slot& slot = slots_[size_t(i)];
        slot.is_filling = true;
        add(0, int64_t(slot.cells.size()), i, false);
    }
}

void Engine::discard_filling() {
    for (Slot& slot : slots_) {
        if (!slot.is_filling) continue;
        llama_memory_seq_rm(memory_, index_of_slot(slot), llama_pos(slot.cells.size()), -1);
        slot.is_filling = false;
    }
}

void Engine::add_taken(Slot& slot) {
    const int index = index_of_slot(slot);
    const auto from = int64_t(slot.cells.size());
    if (slot.phase == Slot::Phase::streaming) {
        add(slot.pending, from, index, true);
    } else {
        const std::vector<Token>& ids = slot.request.ids;
        const int64_t end = from + slot.taken;
        for (int64_t i = from; i < end; ++i) add(ids[size_t(i)], i, index, i + 1 == int64_t(ids.size()));
        if (end < int64_t(ids.size())) return;
    }
    slot.output = batch_.n_tokens - 1;
}

void Engine::add(Token id, int64_t position, int slot, bool has_output) {
    const int32_t i = batch_.n_tokens++;
    batch_.token[i] = id;
    batch_.pos[i] = llama_pos(position);
    batch_.n_seq_id[i] = 1;
    batch_.seq_id[i][0] = slot;
    batch_.logits[i] = has_output;
}

// False: nothing was computed, slots have changed, build the batch again.
bool Engine::decode() {
    const int32_t status = llama_decode(context_, batch_);
    if (status == 0) {
        llama_synchronize(context_);
        discard_filling();
        return true;
    }
    if (status == 1 && make_room()) return false;
    std::fprintf(stderr, "llama_decode failed with status %d\n", status);
    for (Slot& slot : slots_) {
        if (!slot.is_free()) fail(slot, "decode: the computation failed; see the decoder's log");
    }
    drop_everything();
    return false;
}

// The cells are used up: drops the least recently used cached prefix, or else the newest request.
bool Engine::make_room() {
    Slot* oldest = nullptr;
    Slot* newest = nullptr;
    for (Slot& slot : slots_) {
        if (slot.is_free()) {
            if (!slot.cells.empty() && (oldest == nullptr || slot.last_used < oldest->last_used)) oldest = &slot;
        } else if (newest == nullptr || slot.admitted > newest->admitted) {
            newest = &slot;
        }
    }
    if (oldest != nullptr) {
        drop(*oldest);
    } else if (newest != nullptr) {
        fail(*newest, "kv: all cells are in use; raise --kv-cells or lower --slots");
        drop(*newest);
    }
    return oldest != nullptr || newest != nullptr;
}

void Engine::advance(double step_ms) {
    for (Slot& slot : slots_) {
        if (slot.taken == 0) continue;
        if (slot.phase == Slot::Phase::streaming) {
            slot.cells.push_back(slot.pending);
        } else {
            const auto begin = slot.request.ids.begin() + std::ptrdiff_t(slot.cells.size());
            slot.cells.insert(slot.cells.end(), begin, begin + slot.taken);
            slot.prompt_read += slot.taken;
            write_prompt_progress(out_, slot.request.rid, int64_t(slot.cells.size()), int64_t(slot.request.ids.size()),
                                  step_ms, slot.taken);
        }
        if (slot.output >= 0) sample(slot);
    }
}

void Engine::sample(Slot& slot) {
    const uint32_t rid = slot.request.rid;
    const SamplingOptions& sampling = slot.request.sampling;
    if (slot.phase == Slot::Phase::reading) {
        write_reused(out_, rid, slot.reused);
        slot.phase = Slot::Phase::streaming;
        slot.first_token_ms = now_ms();
    }
    float* row = llama_get_logits_ith(context_, slot.output);
    if (row == nullptr) return fail(slot, "decode: no logits were computed; see the decoder's log");
    const Choice& choice = sampler_.choose(row, sampling, slot.grammar.get(), slot.cells, slot.seed,
                                           uint64_t(slot.request.resume + slot.generated));
    if (choice.outcome == Choice::Outcome::nonfinite) {
        slot.drop_at_end = true;
        end(slot, "nonfinite");
        return drop_everything();
    }
    if (choice.outcome == Choice::Outcome::stuck) return fail(slot, "grammar: no token of the vocabulary can follow");
    ++slot.generated;
    slot.pending = choice.id;
    if (sampling.logprobs >= 0) {
        write_token(out_, rid, choice.id, choice.logprob, choice.alternatives);
    } else {
        write_token(out_, rid, choice.id);
    }
    if (llama_vocab_is_eog(vocabulary_, choice.id)) return end(slot, "stop");
    const bool is_full = int64_t(slot.cells.size()) >= options_.context;
    if (slot.generated >= slot.request.max_new || is_full) return end(slot, "length");
    if (slot.grammar && !slot.grammar->accept(choice.id)) fail(slot, "grammar: it refuses a token that it allowed");
}

void Engine::end(Slot& slot, std::string_view finish) {
    const double ended_ms = now_ms();
    const bool has_read = slot.phase == Slot::Phase::streaming;
    Summary summary;
    summary.generated = slot.generated;
    summary.prompt_tokens = int64_t(slot.request.ids.size()) - slot.request.resume;
    summary.prompt_ms = (has_read ? slot.first_token_ms : ended_ms) - slot.started_ms;
    summary.decode_ms = has_read ? ended_ms - slot.first_token_ms : 0;
    summary.finish = finish;
    summary.reused = slot.reused;
    summary.prompt_read = slot.prompt_read;
    write_done(out_, slot.request.rid, summary);
    release(slot);
}

void Engine::fail(Slot& slot, std::string_view error) {
    write_error(out_, slot.request.rid, error);
    release(slot);
}

void Engine::release(Slot& slot) {
    slot.phase = Slot::Phase::free;
    slot.last_used = ++clock_;
    slot.request = {};
    slot.grammar.reset();
    slot.output = -1;
    if (slot.drop_at_end) drop(slot);
}

void Engine::drop(Slot& slot) {
    llama_memory_seq_rm(memory_, index_of_slot(slot), -1, -1);
    slot.cells.clear();
}

// Every cached state goes; what is still in use goes when its request ends.
void Engine::drop_everything() {
    for (Slot& slot : slots_) {
        slot.drop_at_end = true;
        if (slot.is_free()) drop(slot);
    }
}

void Engine::tell_status() {
    const double now = now_ms();
    if (!is_status_due_ || now - status_told_ms_ < 1000) return;
    int64_t used = 0;
    for (const Slot& slot : slots_) used += int64_t(slot.cells.size());
    const int64_t total = options_.is_kv_shared() ? options_.kv_cells : options_.context * options_.slots;
    out_ << "STAT kv_used=" << std::min(used, total) << " kv_cells=" << total << " steps=" << steps_
         << " running=" << running() + embedder_.jobs() << '\n';
    status_told_ms_ = now;
    is_status_due_ = false;
}

// For ever, unless a last STAT is still to be told.
int Engine::idle_timeout_ms() const {
    if (!is_status_due_) return -1;
    return std::max(1, int(status_told_ms_ + 1000 - now_ms()) + 1);
}

}  // namespace ringfence

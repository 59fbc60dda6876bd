#include "admission.hpp"

#include <algorithm>
#include <cstddef>

namespace ringfence {

namespace {

// At least the last prompt token is always computed again: its logits are needed.
int64_t common_prefix(const std::vector<Token>& cells, const std::vector<Token>& prompt) {
    const size_t most = std::min(cells.size(), prompt.size() - 1);
    return std::mismatch(cells.begin(), cells.begin() + std::ptrdiff_t(most), prompt.begin()).first - cells.begin();
}

bool is_continuation(int64_t reused, int64_t held, bool has_empty_slot) {
    const int64_t dropped = held - reused;
    return reused > 0 && dropped <= 16 + (has_empty_slot ? 0 : reused / 2);
}

}  // namespace

Admission admit(const std::vector<SlotView>& slots, const std::vector<Token>& prompt, const AdmissionRules& rules) {
    int best = -1, oldest = -1, source = -1;
    std::vector<int64_t> common(slots.size());
    for (int i = 0; i < int(slots.size()); ++i) {
        const SlotView& slot = slots[size_t(i)];
        common[size_t(i)] = common_prefix(*slot.cells, prompt);
        if (source < 0 || common[size_t(i)] > common[size_t(source)]) source = i;
        if (!slot.is_free) continue;
        const auto is_better = [&](int other) {
            return common[size_t(i)] != common[size_t(other)] ? common[size_t(i)] > common[size_t(other)]
                                                              : slot.last_used > slots[size_t(other)].last_used;
        };
        const auto age = [&](int other) {  // empty slots first, then the least recently used
            return slots[size_t(other)].cells->empty() ? 0 : slots[size_t(other)].last_used;
        };
        if (best < 0 || is_better(best)) best = i;
        if (oldest < 0 || age(i) < age(oldest)) oldest = i;
    }
    if (best < 0) return {};

    const bool has_empty_slot = slots[size_t(oldest)].cells->empty();
    const int64_t held = int64_t(slots[size_t(best)].cells->size());
    Admission admission;
    admission.slot = is_continuation(common[size_t(best)], held, has_empty_slot) ? best : oldest;
    admission.reused = common[size_t(admission.slot)];
    if (rules.can_copy && common[size_t(source)] - admission.reused >= rules.min_copied) {
        admission.source = source;
        admission.reused = common[size_t(source)];
    } else if (!rules.can_copy && common[size_t(best)] > admission.reused) {
        admission.slot = best;  // no way to bring the prefix elsewhere
        admission.reused = common[size_t(best)];
    }
    return admission;
}

}  // namespace ringfence
